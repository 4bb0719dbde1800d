"""Host memory that a rank fills and its writer process reads: one copy of the rank's share, reused by every save.

Tensors on the CPU are copied, too, since training changes them while the writer process reads. Tensors on CUDA devices
are copied on a separate stream into page-locked memory. Work that is queued on the current stream later waits for the
copy, so no kernel overwrites a tensor before it is copied.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, final

import torch

from headway.checkpoint.write.planner import RankShare
from headway.errors import StorageError
from headway.system.files import open_unnamed

_GRAIN_BYTES = 2 << 20  # a state that grows a little needs no new memory
_CUDA_HOST_REGISTER_PORTABLE = 1  # page-locked for all devices


@final
class HostCopy:
    """A copy that may still be running: `wait` for it before reading the memory."""

    def __init__(self, copies: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._copies = copies

    def wait(self) -> float:
        """Waits until the copy is complete; returns for how many seconds a device did nothing but copy."""
        for _, end in self._copies:
            end.synchronize()
        return max((begin.elapsed_time(end) / 1000 for begin, end in self._copies), default=0.0)


@final
class HostMemory:
    """The shared memory. It grows to the size of the largest share; it has no name, so nothing else can open it."""

    def __init__(self) -> None:
        self.fd = open_unnamed("headway-checkpoint")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._last = HostCopy([])

    def copy(self, share: RankShare) -> HostCopy:
        """Copies a share in the layout of its file. CPU tensors are copied when this returns."""
        self._last.wait()  # if the previous save failed, its copy may still be running
        self._last = HostCopy([])
        if not share.size:
            return self._last
        tensors = list(share.tensors())
        devices = {tensor.device for _, tensor in tensors if tensor.is_cuda}
        self._reserve(share.size, pin=bool(devices))
        self._bytes[: len(share.header)] = torch.frombuffer(bytearray(share.header), dtype=torch.uint8)
        self._last = HostCopy([self._copy_device(device, tensors) for device in sorted(devices, key=str)])
        for begin, tensor in tensors:  # while the devices copy
            if not tensor.is_cuda:
                self._copy_tensor(begin, tensor)
        return self._last

    def _copy_device(
        self, device: torch.device, tensors: list[tuple[int, torch.Tensor]]
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        training, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        copying.wait_stream(training)
        with torch.cuda.stream(copying):
            begin.record(copying)
            for offset, tensor in tensors:
                if tensor.device == device:
                    self._copy_tensor(offset, tensor)
                    tensor.record_stream(copying)  # keeps its memory from being reused before the copy ends
            end.record(copying)
        training.wait_stream(copying)
        return begin, end

    def _copy_tensor(self, begin: int, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        destination = self._bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        destination.copy_(tensor, non_blocking=tensor.is_cuda)

    def _reserve(self, size: int, *, pin: bool) -> None:
        if len(self._bytes) < size:
            self._unpin()
            whole = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
            os.ftruncate(self.fd, whole)
            # the tensor holds the mapping, which is closed with it
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, whole), dtype=torch.uint8)
        if pin and not self._pinned:
            error = int(
                _cudart().cudaHostRegister(
                    self._bytes.data_ptr(), len(self._bytes), _CUDA_HOST_REGISTER_PORTABLE
                )
            )
            if error:
                raise StorageError(
                    f"{len(self._bytes)} bytes of host memory could not be page-locked to save from the GPU "
                    f"(CUDA error {error}): free host memory, or save with background=False"
                )
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False

    def close(self) -> None:
        """Frees the memory."""
        self._last.wait()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
