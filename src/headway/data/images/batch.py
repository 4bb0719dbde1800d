"""`Batch`: the batches of an image transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from headway.data.images.cpu import DTYPES, largest_value
from headway.data.images.fp8 import Fp8Scaling
from headway.data.images.memory_pool import MemoryPool
from headway.data.images.transforms import ImageTransform
from headway.data.order.permutation import UInts
from headway.errors import UsageError

SAMPLES = "samples"
"""the part of a batch that identifies its samples: rows of dataset, epoch, shard and sample"""
IMAGE = "__image__"
"""the part of a sample with its image: an `EncodedImage`, or its pixels"""
FP8 = "fp8"
"""the part of a batch with the scaling of crops in FP8"""
PLACE = "__place__"
"""the part of a sample with the location of its crops: a `CropPlace`"""


class EncodedImage(NamedTuple):
    """A JPEG that is decoded on the device."""

    data: memoryview
    height: int
    width: int
    turn: int
    """its EXIF orientation; 1 if that is ignored"""

    @property
    def address(self) -> int:
        """Where its bytes are in memory."""
        found: int = np.frombuffer(self.data, np.uint8).__array_interface__["data"][0]
        return found


@final
class Batch(dict[str, Any]):
    """A batch of crops with all other parts of its samples: a dict whose usual parts are also attributes.

    batch.global_crops, batch.local_crops       # of MultiCrop: crops x samples x 3 x size x size
    batch.images, batch.labels                  # of RandomResizedCrop and CenterCrop
    batch["json"]                               # any other part, by its extension
    """

    @property
    def images(self) -> Tensor:
        """The crops of a transform that makes one of each sample: samples x 3 x size x size."""
        return cast(Tensor, self["images"])

    @property
    def global_crops(self) -> Tensor:
        """The large crops; `flatten(0, 1)` gives all first crops, then all second ones, without a copy."""
        return cast(Tensor, self["global_crops"])

    @property
    def local_crops(self) -> Tensor:
        """The small crops."""
        return cast(Tensor, self["local_crops"])

    @property
    def masks(self) -> Tensor:
        """Which patches of the global crops are hidden, with `BlockMasks`: crops x samples x patches."""
        return cast(Tensor, self["masks"])

    @property
    def labels(self) -> Tensor:
        """The class of each sample, its part `cls`."""
        return cast(Tensor, self["cls"])

    @property
    def fp8(self) -> Fp8Scaling:
        """The scaling of crops in FP8, with `output="fp8"`."""
        return cast(Fp8Scaling, self[FP8])

    @property
    def samples(self) -> Tensor:
        """The samples of the batch: rows of dataset (its position among the sorted names), epoch, shard and sample."""
        return cast(Tensor, self[SAMPLES])


def own_parts(transform: ImageTransform) -> set[str]:
    """Returns the names of parts that a transform adds to samples and batches; samples must not use them."""
    scaling = {FP8} if transform.output == "fp8" else set[str]()
    return {SAMPLES, IMAGE, PLACE, *(group.name for group in transform.groups()), *scaling}


@final
class CropMemory:
    """Memory for the crops of a whole batch: threads write the crops of each sample in place, and nothing is copied.

    The memory comes from a pool. NumPy requests huge pages: a page fault per 4 kB took as long as decoding the images.
    """

    def __init__(self, transform: ImageTransform, samples: int, pool: MemoryPool) -> None:
        self.samples, self._stacks, dtype = samples, dict[str, Tensor](), DTYPES[transform.output]
        for group in transform.groups():
            sides = [group.size, group.size]
            shape = [*sides, 3] if transform.channels_last else [3, *sides]
            pixels = samples * len(group.recipes) * 3 * group.size**2
            memory = torch.from_numpy(pool.take(pixels * dtype.itemsize)).view(dtype)
            stack = memory.view(len(group.recipes), samples, *shape)
            self._stacks[group.name] = stack.permute(0, 1, 4, 2, 3) if transform.channels_last else stack

    def of_sample(self, number: int) -> dict[str, Tensor]:
        """Returns where the crops of a sample go, by the names of their groups."""
        return {name: stack[:, number] for name, stack in self._stacks.items()}

    def whole(self) -> dict[str, Tensor]:
        """Returns the crops of all samples, as `stack_crops` does."""
        return {name: stack if name != "images" else stack[0] for name, stack in self._stacks.items()}


class CropPlace(NamedTuple):
    """The location of a sample's crops: their number in a `CropMemory`."""

    memory: CropMemory
    number: int


def join_crops(transform: ImageTransform, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the crops of several samples: their common memory, if it holds just these in this order, else a copy."""
    places: list[CropPlace | None] = [sample.get(PLACE) for sample in samples]
    first = places[0]
    if first is None or places != [CropPlace(first.memory, n) for n in range(first.memory.samples)]:
        return stack_crops(transform, samples)
    return first.memory.whole()


def stack_crops(transform: ImageTransform, crops: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks the crops of several images: crops x samples, and samples alone where an image has one crop."""
    found = dict[str, Tensor]()
    for group in transform.groups():
        parts = [each[group.name] for each in crops]
        dtype = parts[0].dtype
        if dtype is torch.float8_e4m3fn:  # torch cannot stack them
            parts = [part.view(torch.uint8) for part in parts]
        if transform.channels_last:
            stacked = torch.stack([part.permute(0, 2, 3, 1) for part in parts], 1).permute(0, 1, 4, 2, 3)
        else:
            stacked = torch.stack(parts, 1)
        found[group.name] = (stacked if group.name != "images" else stacked[0]).view(dtype)
    return found


def parts_of(collated: Any) -> dict[str, Any]:
    """Returns what a `collate_fn` makes of all parts but the images; raises `UsageError` if that is not a dict."""
    if not isinstance(collated, dict):
        raise UsageError(
            f"collate_fn returned a {type(collated).__name__}: with an image transform, return a dict of the parts of "
            "the batch other than its crops, which the loader adds"
        )
    return collated


def finish_batch(batch: Batch, transform: ImageTransform, keys: UInts) -> Batch:
    """Adds the scaling of FP8 values, and applies the transforms of whole batches."""
    if transform.output == "fp8":
        batch[FP8] = Fp8Scaling.of(largest_value(transform), batch.samples.device)
    for step in transform.then:
        batch = step(batch, keys)
    return batch
