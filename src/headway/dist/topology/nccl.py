"""NCCL and gloo settings: only a few, only those that are not set yet, each with its reason.

NCCL finds NVLink, switches and active InfiniBand ports by itself. What is left are interfaces that it cannot tell from
real ones, and a log level at which it prints the cause of a failure. `NCCL_IB_DISABLE` sends the traffic between nodes
over TCP, and `NCCL_PROTO=LL128` can corrupt data where it is not supported: headway never sets either, and warns if
they are set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from headway.dist.topology.machine import Nic, Topology, virtual_prefix
from headway.system import files

# What NCCL ignores by itself when NCCL_SOCKET_IFNAME is not set. It takes names as prefixes.
_NCCL_SKIPS = ("lo", "docker", "virbr")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable, its value, and the reason; `value=None` means that it is left as it is."""

    name: str
    value: str | None
    why: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} left as it is: {self.why}"
        return f"{self.name}={self.value}: {self.why}"


def nccl_settings(
    topology: Topology, nodes: int, environ: Mapping[str, str], *, toward_root: str | None = None
) -> list[Setting]:
    """Returns the settings for a job of `nodes` machines like this one, to be made before its process group.

    `toward_root` is the interface through which this machine reaches rank 0, or has been reached as rank 0.

    `environ` has what is set already, by variables and by NCCL's files (`read_conf`): that is kept.

    >>> nccl_settings(Topology(host="laptop"), nodes=1, environ={})
    []
    """
    settings: list[Setting] = []
    if nodes > 1 and "GLOO_SOCKET_IFNAME" not in environ:
        settings += _gloo_interface(topology, toward_root)
    if not topology.gpus:
        return settings
    if "NCCL_DEBUG" not in environ:
        settings.append(
            Setting(name="NCCL_DEBUG", value="WARN", why="when NCCL fails, its warning names the cause")
        )
    if nodes > 1:
        if "NCCL_SOCKET_IFNAME" not in environ:
            settings += _nccl_interfaces(topology)
        if "NCCL_IB_HCA" not in environ:
            settings += _ports_down(topology)
    return settings + _doubtful_choices(topology, nodes, environ)


def read_conf(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Reads what NCCL's configuration files set; variables in the environment override them."""
    own = Path(environ.get("NCCL_CONF_FILE") or Path(environ.get("HOME", "/nowhere"), ".nccl.conf"))
    values: dict[str, str] = {}
    for path in (own, root / "etc/nccl.conf"):  # the first to name a variable wins
        try:
            lines = files.read_regular(path, follow=True).decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                values.setdefault(name, value)
    return values


def _gloo_interface(topology: Topology, toward_root: str | None) -> list[Setting]:
    """Chooses an interface for gloo, which listens where the host name resolves to: not the loopback."""
    if topology.address is not None and not ip_address(topology.address).is_loopback:
        return []
    points = "to nothing" if topology.address is None else f"to {topology.address}"
    cause = f"the host name {topology.host!r} resolves {points}, where other nodes cannot reach gloo"
    if toward_root is not None:
        return [
            Setting(
                name="GLOO_SOCKET_IFNAME", value=toward_root, why=f"{cause}; this interface reaches rank 0"
            )
        ]
    default = [nic.name for nic in topology.nics if nic.default and nic.up and not nic.virtual]
    if default:
        why = f"{cause}; this interface has the default route"
        return [Setting(name="GLOO_SOCKET_IFNAME", value=default[0], why=why)]
    why = (
        f"{cause}, and no interface is clearly the right one: set it to the one that reaches the other nodes"
    )
    return [Setting(name="GLOO_SOCKET_IFNAME", value=None, why=why)]


def _nccl_interfaces(topology: Topology) -> list[Setting]:
    """Excludes interfaces of containers and tunnels that NCCL would take for real; it ignores only Docker's own."""
    up = [nic for nic in topology.nics if nic.up]
    if any(nic.name.startswith("ib") for nic in up):  # NCCL prefers these to all others
        return []
    misleading = [nic for nic in up if nic.virtual and not nic.name.startswith(_NCCL_SKIPS)]
    real = [nic for nic in up if not nic.virtual]
    if not misleading or not real:
        return []
    prefixes = dict.fromkeys([*_NCCL_SKIPS, *(virtual_prefix(nic.name) for nic in misleading)])
    why = f"NCCL would use {_listed(misleading)} to reach other nodes"
    return [Setting(name="NCCL_SOCKET_IFNAME", value="^" + ",".join(prefixes), why=why)]


def _ports_down(topology: Topology) -> list[Setting]:
    down = [port for port in topology.ports if not port.active]
    if not down or len(down) == len(topology.ports):
        return []
    ports = ", ".join(str(port) for port in down)
    left = f"{len(topology.ports) - len(down)} of {len(topology.ports)} ports"
    why = f"{ports} not active; NCCL skips what is down, so traffic between nodes has {left}"
    return [Setting(name="NCCL_IB_HCA", value=None, why=why)]


def _doubtful_choices(topology: Topology, nodes: int, environ: Mapping[str, str]) -> list[Setting]:
    """Warns about settings of the user that cost speed or correctness; they are not changed."""
    found = []
    active = sum(port.active for port in topology.ports)
    if nodes > 1 and active and environ.get("NCCL_IB_DISABLE") == "1":
        why = f"1 sends traffic between nodes over TCP, past {active} active ports; unset it unless that is intended"
        found.append(Setting(name="NCCL_IB_DISABLE", value=None, why=why))
    if "LL128" in environ.get("NCCL_PROTO", "").upper() and not environ["NCCL_PROTO"].startswith("^"):
        why = f"{environ['NCCL_PROTO']} can corrupt data where LL128 is not supported; unset it, NCCL chooses"
        found.append(Setting(name="NCCL_PROTO", value=None, why=why))
    if environ.get("NCCL_P2P_DISABLE") == "1" and any(link.kind == "nvlink" for link in topology.links):
        why = "1 leaves the NVLinks of this machine unused; unset it unless that is intended"
        found.append(Setting(name="NCCL_P2P_DISABLE", value=None, why=why))
    return found


def _listed(nics: Sequence[Nic]) -> str:
    names = [nic.name for nic in nics]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
