"""GPUs, their links and the driver, as NVIDIA's management library (NVML) reports them. No CUDA, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import byref
from dataclasses import dataclass, field

import pynvml as nv

SWITCH = "switch"

_ANCESTORS = {
    nv.NVML_TOPOLOGY_INTERNAL: "same board",
    nv.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    nv.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
    nv.NVML_TOPOLOGY_HOSTBRIDGE: "host bridge",
    nv.NVML_TOPOLOGY_NODE: "same CPU socket",
    nv.NVML_TOPOLOGY_SYSTEM: "between CPU sockets",
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. `memory` is in bytes, 0 if it has none of its own; `nvlinks` counts its NVLinks by their far end, a PCI
    address or "switch"; `pcie` says what is between it and each other GPU; `fabric` names the NVLink domain that it
    shares with other machines."""

    index: int
    name: str
    memory: int
    uuid: str
    pci: str
    numa: int | None = None
    fabric: str | None = None
    nvlinks: Mapping[str, int] = field(default_factory=dict)
    pcie: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA driver, and the newest CUDA it can run: (13, 0)."""

    version: str
    cuda: tuple[int, int]


def read_gpus() -> list[Gpu]:
    """Returns the GPUs of this machine that respond; none without a driver."""
    found: list[Gpu] = []
    with _session() as available:
        handles = {}
        for index in range(nv.nvmlDeviceGetCount() if available else 0):
            with suppress(nv.NVMLError):  # broken, or another job's
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                handles[pci_address(nv.nvmlDeviceGetPciInfo(handle).busId)] = handle
        for pci in handles:
            with suppress(nv.NVMLError):
                found.append(_gpu(len(found), pci, handles))
    return found


def read_driver() -> Driver | None:
    """Returns the driver of this machine; None if there is none that responds."""
    with _session() as available:
        if not available:
            return None
        cuda = nv.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(version=nv.nvmlSystemGetDriverVersion(), cuda=(cuda // 1000, cuda % 1000 // 10))


def pci_address(bus_id: str) -> str:
    """Converts a PCI address from NVML's notation to that of sysfs.

    >>> pci_address("00000000:1B:00.0")
    '0000:1b:00.0'
    """
    domain, rest = bus_id.lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"


@contextmanager
def _session() -> Iterator[bool]:
    """Yields whether there is a driver that responds."""
    try:
        nv.nvmlInit()
    except nv.NVMLError:  # also "Unknown Error": a container lost its devices, as when systemd is reloaded
        yield False
        return
    try:
        yield True
    finally:
        nv.nvmlShutdown()


def _gpu(index: int, pci: str, handles: Mapping[str, object]) -> Gpu:
    handle = handles[pci]
    return Gpu(
        index=index,
        name=nv.nvmlDeviceGetName(handle),
        memory=_memory(handle),
        uuid=nv.nvmlDeviceGetUUID(handle),
        pci=pci,
        fabric=_fabric(handle),
        nvlinks=_nvlinks(handle),
        pcie={address: _between(handle, other) for address, other in handles.items() if address != pci},
    )


def _memory(handle: object) -> int:
    try:
        return int(nv.nvmlDeviceGetMemoryInfo(handle).total)
    except nv.NVMLError:  # a GPU that shares the memory of its host
        return 0


def _nvlinks(handle: object) -> dict[str, int]:
    counts: dict[str, int] = {}
    for number in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            if not nv.nvmlDeviceGetNvLinkState(handle, number):
                continue
            end = _far_end(handle, number)
        except nv.NVMLError:  # this GPU has fewer links, or none
            continue
        counts[end] = counts.get(end, 0) + 1
    return counts


def _far_end(handle: object, number: int) -> str:
    if nv.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number) == nv.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return pci_address(nv.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId)


def _fabric(handle: object) -> str | None:
    info = nv.c_nvmlGpuFabricInfoV_t()
    try:
        nv.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    except nv.NVMLError:
        return None
    cluster = bytes(info.clusterUuid)  # all zero on machines whose NVLinks end at their own switches
    if info.state != nv.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}.{info.cliqueId}"


def _between(handle: object, other: object) -> str:
    try:
        return _ANCESTORS.get(nv.nvmlDeviceGetTopologyCommonAncestor(handle, other), "unknown")
    except nv.NVMLError:
        return "unknown"
