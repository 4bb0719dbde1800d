"""Pinned memory that is used in turn: a slot for each of the last few batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

_SLOTS = 3  # of batches: one that is filled, one that is copied, and one to spare
_ALIGNMENT_BYTES = 256
_LEAST_BYTES = 2**16


@dataclass(slots=True)
class RingSlot:
    """The pinned memory of one batch, and the event after which it has been copied."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    used: int = 0

    def fill(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to the next bytes of the slot, and returns it there, with the same layout."""
        start, size = self.used, tensor.numel() * tensor.element_size()
        self.used += size_in_slot(tensor)
        strides = (
            tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        )
        flat = self.memory[start : start + size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, strides, flat.storage_offset()).copy_(tensor)


@final
class PinnedRing:
    """Slots in turn. A slot is larger than before only if its batch is, so nothing is allocated once all are in use."""

    def __init__(self) -> None:
        self._slots = deque(RingSlot() for _ in range(_SLOTS))

    def next_slot(self, size: int) -> RingSlot:
        """Returns a slot of at least `size` bytes, which the device has finished to copy.

        It waits if the device is still copying the third last batch, never for anything that the device computes.
        """
        slot = self._slots.popleft()
        self._slots.append(slot)
        if not slot.copied.query():  # type: ignore[no-untyped-call]
            slot.copied.synchronize()
        slot.used = 0
        if len(slot.memory) < size:
            whole = max(
                _LEAST_BYTES, 1 << (size - 1).bit_length()
            )  # batches of ragged samples grow a few times only
            slot.memory = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
        return slot


def fits_slot(tensor: Tensor) -> bool:
    """Whether a tensor is copied through a slot: in memory that is not pinned, and of a layout that torch can pin.

    A subclass, such as the images and masks of torchvision, would come out as a plain tensor: it is copied as it is.
    """
    return (
        type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_pinned()
    )


def size_in_slot(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes in a slot."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
