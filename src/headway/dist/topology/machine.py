"""The hardware of this machine: GPUs and their links, InfiniBand ports, network interfaces, NUMA nodes.

Facts come from NVML, /sys and /proc; nothing here needs torch or a GPU. A machine is one operating system: a
GB200 NVL72 rack is 18 machines of 4 GPUs, tied together by an NVLink fabric (`Gpu.fabric`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from headway.dist.topology.nvml import SWITCH, Gpu, read_gpus

# Interfaces of containers, bridges, tunnels. A user's network in Docker has a bridge br- and 12 hex digits.
_VIRTUAL = re.compile(
    r"lo$|docker|veth|virbr|br-[0-9a-f]{12}$|podman|cni|flannel|cali|cilium|lxc|lxd|kube|vxlan"
    r"|tun|tap|wg|tailscale|dummy|ifb"
)


@dataclass(frozen=True, kw_only=True)
class GpuLink:
    """The best connection between GPUs `a` and `b`: NVLinks, direct or through a switch, or PCIe through `via`."""

    a: int
    b: int
    kind: Literal["nvlink", "pcie"]
    count: int
    via: str

    def __str__(self) -> str:
        if self.kind == "pcie":
            return f"PCIe ({self.via})"
        return f"{self.count} NVLinks" + (" through a switch" if self.via == SWITCH else "")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an RDMA adapter; `layer` is "InfiniBand", or "Ethernet" for RoCE."""

    device: str
    port: int
    active: bool
    gbits: float | None
    layer: str

    def __str__(self) -> str:
        return f"{self.device} port {self.port}"


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network interface: `virtual` for containers and tunnels, `default` where the default route leaves."""

    name: str
    up: bool
    mbits: int | None
    virtual: bool
    default: bool


@dataclass(frozen=True, kw_only=True)
class Numa:
    """One NUMA node and its CPUs as the kernel writes them: "0-55,112-167"."""

    index: int
    cpus: str


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One machine. `address` is what its own host name resolves to, None if it does not resolve."""

    host: str
    address: str | None = None
    gpus: Sequence[Gpu] = ()
    links: Sequence[GpuLink] = ()
    ports: Sequence[Port] = ()
    nics: Sequence[Nic] = ()
    numa: Sequence[Numa] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Describes the machine in one line.

        >>> Topology(host="laptop").describe()
        'no NVIDIA GPU; no InfiniBand'
        """
        return f"{describe_gpus(self)}; {describe_ports(self)}"


def detect(
    *,
    root: Path = Path("/"),
    gpus: Callable[[], Sequence[Gpu]] = read_gpus,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> Topology:
    """Reads the topology of this machine. The arguments replace its file system root, NVML and resolver.

    >>> print(detect().describe())  # doctest: +SKIP
    4 x NVIDIA A100-SXM4-80GB, all pairs by 4 NVLinks; 2 of 2 InfiniBand ports active at 200 Gb/s
    """
    host = socket.gethostname()
    found = [replace(gpu, numa=_numa_of(gpu, root)) for gpu in gpus()]
    return Topology(
        host=host,
        address=_resolved(host, resolve),
        gpus=found,
        links=[_link(a, b) for a, b in combinations(found, 2)],
        ports=_ports(root / "sys/class/infiniband"),
        nics=_nics(root / "sys/class/net", default=_default_interface(root / "proc/net/route")),
        numa=_numa(root / "sys/devices/system/node"),
    )


def describe_gpus(topology: Topology) -> str:
    """Describes the GPUs and their links."""
    if not topology.gpus:
        return "no NVIDIA GPU"
    names = [gpu.name for gpu in topology.gpus]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    kinds = {str(link) for link in topology.links}
    if len(kinds) == 1:
        text += f", all pairs by {kinds.pop()}"
    elif kinds:
        nvlink = sum(link.kind == "nvlink" for link in topology.links)
        text += f", {nvlink} of {len(topology.links)} pairs by NVLink"
    if any(gpu.fabric for gpu in topology.gpus):
        text += ", in an NVLink fabric with other machines"
    return text


def describe_ports(topology: Topology) -> str:
    """Describes the InfiniBand and RoCE ports in a few words."""
    if not topology.ports:
        return "no InfiniBand"
    active = [port for port in topology.ports if port.active]
    rates = "/".join(
        f"{rate:g}" for rate in sorted({port.gbits for port in active if port.gbits is not None})
    )
    layers = " and ".join(sorted({port.layer for port in topology.ports}))
    text = f"{len(active)} of {len(topology.ports)} {layers} ports active"
    return f"{text} at {rates} Gb/s" if rates else text


def virtual_prefix(name: str) -> str:
    """Returns the part of an interface's name that marks it as one of containers, bridges or tunnels, if any.

    >>> virtual_prefix("veth3fa9c1e"), virtual_prefix("enp1s0")
    ('veth', '')
    """
    found = _VIRTUAL.match(name)
    return found[0] if found else ""


def _link(a: Gpu, b: Gpu) -> GpuLink:
    if direct := a.nvlinks.get(b.pci, 0):
        return GpuLink(a=a.index, b=b.index, kind="nvlink", count=direct, via="direct")
    if switched := min(a.nvlinks.get(SWITCH, 0), b.nvlinks.get(SWITCH, 0)):
        return GpuLink(a=a.index, b=b.index, kind="nvlink", count=switched, via=SWITCH)
    return GpuLink(a=a.index, b=b.index, kind="pcie", count=1, via=a.pcie.get(b.pci, "unknown"))


def _numa_of(gpu: Gpu, root: Path) -> int | None:
    node = _number(_text(root / "sys/bus/pci/devices" / gpu.pci / "numa_node"))
    # the kernel writes -1 where there is one node only
    return None if node is None or node < 0 else int(node)


def _ports(directory: Path) -> list[Port]:
    return [
        Port(
            device=port.parent.parent.name,
            port=int(port.name),
            active="ACTIVE" in _text(port / "state").split(),
            gbits=_number(_text(port / "rate")),
            layer=_text(port / "link_layer") or "InfiniBand",
        )
        for port in sorted(directory.glob("*/ports/*"), key=_natural)
    ]


def _nics(directory: Path, *, default: str | None) -> list[Nic]:
    nics = []
    for entry in sorted(directory.glob("*"), key=_natural):
        if not (entry / "operstate").exists():  # such as bonding_masters, a file that lists names
            continue
        speed = _number(_text(entry / "speed"))
        nics.append(
            Nic(
                name=entry.name,
                up=_text(entry / "operstate") in ("up", "unknown"),  # lo and tunnels have no carrier
                mbits=int(speed) if speed is not None and speed > 0 else None,
                virtual=bool(virtual_prefix(entry.name)),
                default=entry.name == default,
            )
        )
    return nics


def _default_interface(table: Path) -> str | None:
    """Returns the interface of the best default IPv4 route. Columns 0, 1, 6, 7: name, destination, metric, mask."""
    rows = [line.split() for line in _text(table).splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else None


def _numa(directory: Path) -> list[Numa]:
    nodes = sorted(directory.glob("node[0-9]*"), key=_natural)
    return [Numa(index=int(node.name.removeprefix("node")), cpus=_text(node / "cpulist")) for node in nodes]


def _resolved(host: str, resolve: Callable[[str], str]) -> str | None:
    try:
        return resolve(host)
    except OSError:
        return None


def _text(path: Path) -> str:
    """Reads a file of /sys or /proc; empty if it cannot be read, such as the speed of an unplugged interface."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
