"""A ring of pinned memory: one slot for each of the last few batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

_SLOTS = 3  # one that is being filled, one that is being copied, and one to spare
_ALIGNMENT_BYTES = 256
_LEAST_BYTES = 2**16


@dataclass(slots=True)
class RingSlot:
    """The pinned memory of one batch, and the event that is recorded after its copy."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    used: int = 0

    def fill(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to the next free bytes of the slot, and returns the copy, with the same layout."""
        start, size = self.used, tensor.numel() * tensor.element_size()
        self.used += size_in_slot(tensor)
        strides = (
            tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        )
        flat = self.memory[start : start + size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, strides, flat.storage_offset()).copy_(tensor)


@final
class PinnedRing:
    """Lends slots in turn. A slot grows only if a batch needs it, so a steady state allocates nothing."""

    def __init__(self) -> None:
        self._slots = deque(RingSlot() for _ in range(_SLOTS))

    def next_slot(self, size: int) -> RingSlot:
        """Returns a slot of at least `size` bytes from which no copy is in progress.

        Waits if the device is still copying the batch before the last two, but never for computation on the device.
        """
        slot = self._slots.popleft()
        self._slots.append(slot)
        if not slot.copied.query():  # type: ignore[no-untyped-call]
            slot.copied.synchronize()
        slot.used = 0
        if len(slot.memory) < size:
            # ragged batches grow a slot a few times only
            whole = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
            slot.memory = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
        return slot


def fits_slot(tensor: Tensor) -> bool:
    """Whether a tensor is copied through a slot: it is in pageable memory, and has a layout that torch can pin.

    A subclass, such as torchvision's images and masks, would become a plain tensor there, so it is copied directly.
    """
    return (
        type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_pinned()
    )


def size_in_slot(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes in a slot."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
