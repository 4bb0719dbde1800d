"""Pinned memory for the bytes of JPEGs: a GPU copies from it by itself, and nvJPEG needs a third less time."""

from __future__ import annotations

import threading
from typing import final

import torch

_BLOCK_BYTES = 2**23
_PORTABLE = 1  # cudaHostRegisterPortable


@final
class PinnedMemory(threading.local):
    """Gives each thread pieces of blocks. A block returns to torch's pool when no piece of it is in use.

    Keep a reference to a piece until the device has read it.
    """

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def allocate(self, count: int) -> memoryview:
        """Returns `count` bytes."""
        if count > len(self._rest):
            block = torch.empty(
                max(count, _BLOCK_BYTES), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
            self._rest = block.numpy().data
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece


@final
class HostPinning:
    """Pins memory that was allocated elsewhere, and is shared with other processes, for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, count: int) -> None:
        """Pins `count` bytes; does nothing without CUDA."""
        self._call("cudaHostRegister", address, count, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Unpins memory that `pin` has pinned."""
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> None:
        if torch.cuda.is_available():
            with torch.cuda.device(self._device):  # a new thread would use the first device
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(getattr(runtime, name)(*arguments))
