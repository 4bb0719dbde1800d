"""`DeviceFeed`: copies batches to a GPU while it computes; neither the host nor the GPU waits for a copy.

A copy from pageable memory makes the host wait until the stream is idle, and a copy on the training stream makes the
GPU wait for the copy. So batches go through pinned memory, on a stream of their own, and the training stream waits for
an event. Small tensors are the exception: CUDA copies them with the call, which costs less than all of that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from headway.data.feed.nested import (
    find_leaves,
    find_tensors,
    is_record,
    like,
    like_mapping,
    map_fields,
    map_tensors,
    moves_itself,
)
from headway.data.feed.pinned_ring import PinnedRing, fits_slot, size_in_slot
from headway.errors import UsageError

_SMALL_BYTES = 2**16
"""CUDA copies up to this many bytes from pageable memory without waiting for the stream"""


class StagedBatch(NamedTuple):
    """A batch that is being copied to a device, or computed there."""

    batch: Any
    ready: torch.cuda.Event
    """recorded when the batch is complete"""
    device: torch.device | None = None
    """the device for objects in the batch that move themselves, which `hand_over` moves"""

    def hand_over(self) -> Any:
        """Returns the batch for use on the current stream, which waits for it; the host does not."""
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor in find_tensors(self.batch):
            if not tensor.is_cuda:
                continue
            if tensor.device not in streams:
                streams[tensor.device] = torch.cuda.current_stream(tensor.device)
                streams[tensor.device].wait_event(self.ready)
            # the allocator must not reuse its memory before this stream is done with it
            tensor.record_stream(streams[tensor.device])
        # objects move on the current stream: their tensors are not known, and cannot be recorded
        return self.batch if self.device is None else to_device(self.batch, self.device)


@final
class DeviceFeed:
    """Copies batches to a GPU while it computes.

    feed = DeviceFeed(torch.device("cuda"))
    staged = feed.stage(batch)              # on any thread, some batches ahead
    batch = staged.hand_over()              # on the training thread
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ring, self._lock = PinnedRing(), threading.Lock()

    def stage(self, batch: Any) -> StagedBatch:
        """Starts to copy a batch. The caller may change its tensors at once, except those that were already pinned."""
        pageable = []
        for tensor in find_tensors(batch):
            check_device(tensor, self._device)
            if fits_slot(tensor):
                pageable.append(tensor)
        with self._lock, torch.cuda.stream(self._stream):  # threads of several loaders may feed
            slot = self._ring.next_slot(sum(map(size_in_slot, pageable))) if pageable else None
            pinned = {id(tensor): slot.fill(tensor) for tensor in pageable} if slot else {}
            moved = map_tensors(
                batch, lambda tensor: pinned.get(id(tensor), tensor).to(self._device, non_blocking=True)
            )
            if slot is not None:
                slot.copied.record(self._stream)
            later = self._device if any(map(moves_itself, find_leaves(moved))) else None
            return StagedBatch(moved, self._stream.record_event(), later)

    def move(self, batch: Any) -> Any:
        """Returns the batch on the device, for use on the current stream."""
        return to_device(batch, self._device) if is_small(batch) else self.stage(batch).hand_over()


@cache
def shared_feed(device: torch.device) -> DeviceFeed:
    """Returns the feed of a device. All loaders share it, because torch caches memory per stream."""
    return DeviceFeed(device)


@runtime_checkable
class FeedableLoader(Protocol):
    """A loader whose own threads copy its batches to a device, some batches ahead."""

    def feed_to(self, feed: DeviceFeed | None, /) -> None: ...


def is_small(batch: Any) -> bool:
    """Whether copying the batch blocks nothing, because none of its tensors is large."""
    return all(tensor.numel() * tensor.element_size() <= _SMALL_BYTES for tensor in find_tensors(batch))


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on `device`; copies from pinned memory are asynchronous.

    Tensors are found in tuples, lists, dicts and dataclasses; an object with a `to` of its own is moved with that.
    """
    if isinstance(batch, (tuple, list)):
        kind = type(batch)
        if kind is not tuple and kind is not list and moves_itself(batch):
            return batch.to(device)  # type: ignore[union-attr]
        parts = []
        for part in batch:  # most parts are plain tensors: no recursion for them
            plain = type(part) is Tensor and part.is_cpu
            parts.append(part.to(device, non_blocking=True) if plain else to_device(part, device))
        return parts if kind is list else tuple(parts) if kind is tuple else like(batch, parts)
    if isinstance(batch, Tensor):
        if batch.device == device:
            return batch
        check_device(batch, device)
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return like_mapping(batch, {key: to_device(part, device) for key, part in batch.items()})
    if moves_itself(batch):
        return batch.to(device)
    if is_record(batch):
        return map_fields(batch, lambda part: to_device(part, device))
    return batch


def check_device(tensor: Tensor, device: torch.device) -> None:
    """Refuses a tensor on a device that is neither the CPU nor the rank's."""
    if tensor.device != device and not tensor.is_cpu:
        raise UsageError(
            f"a batch has a tensor on {tensor.device}, but this rank uses {device}: return tensors on the CPU or on "
            f"{device} from the loader"
        )
