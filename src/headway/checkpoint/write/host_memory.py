"""Memory that a rank fills and its helper process reads: one copy of the rank's share, kept for the next save.

Tensors are really copied, also those on the CPU: training may go on as soon as the copy is made. From CUDA devices it
is made on a stream of its own into page-locked memory; what the current stream is given later waits for it, so no
kernel overwrites what was not copied yet.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import Any, final

import torch

from headway.checkpoint.write.planner import Share
from headway.errors import StorageError

_GRAIN = 2 << 20  # a state that grows a little needs no new memory
_PORTABLE = 1  # page-locked for all devices: cudaHostRegisterPortable


@final
class Staged:
    """A copy in the making: `wait` for it before reading the memory."""

    def __init__(self, copies: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._copies = copies

    def wait(self) -> float:
        """Returns when the copy is whole. The seconds for which devices stood still for it."""
        for _, end in self._copies:
            end.synchronize()
        return max((begin.elapsed_time(end) / 1000 for begin, end in self._copies), default=0.0)


@final
class Memory:
    """The shared memory. It grows to the size of the largest share, and nobody else can open it: it has no name."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create("headway-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._last = Staged([])

    def stage(self, share: Share) -> Staged:
        """Copies a share as the file that it will be. CPU tensors are copied when this returns."""
        self._last.wait()  # if nobody has, because the save failed before
        self._last = Staged([])
        if not share.size:
            return self._last
        tensors = list(share.tensors())
        devices = {tensor.device for _, tensor in tensors if tensor.is_cuda}
        self._reserve(share.size, pin=bool(devices))
        self._bytes[: len(share.header)] = torch.frombuffer(bytearray(share.header), dtype=torch.uint8)
        self._last = Staged([self._stage_device(device, tensors) for device in sorted(devices, key=str)])
        for begin, tensor in tensors:  # while the devices copy
            if not tensor.is_cuda:
                self._place(begin, tensor)
        return self._last

    def _stage_device(
        self, device: torch.device, tensors: list[tuple[int, torch.Tensor]]
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        training, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        copying.wait_stream(training)
        with torch.cuda.stream(copying):
            begin.record(copying)
            for offset, tensor in tensors:
                if tensor.device == device:
                    self._place(offset, tensor)
                    tensor.record_stream(copying)  # its memory is not given away before
            end.record(copying)
        training.wait_stream(copying)
        return begin, end

    def _place(self, begin: int, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        place = self._bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=tensor.is_cuda)

    def _reserve(self, size: int, *, pin: bool) -> None:
        if len(self._bytes) < size:
            self._unpin()
            whole = -(-size // _GRAIN) * _GRAIN
            os.ftruncate(self.fd, whole)
            # never closed by hand: the tensor keeps it, and it goes with the tensor
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, whole), dtype=torch.uint8)
        if pin and not self._pinned:
            refused = int(_cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), _PORTABLE))
            if refused:
                raise StorageError(
                    f"{len(self._bytes)} bytes of host memory could not be page-locked to save from the GPU "
                    f"(CUDA error {refused}): free host memory, or save with background=False"
                )
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False

    def close(self) -> None:
        """Gives the memory back."""
        self._last.wait()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
