"""Rendezvous: how ranks that have only their numbers find rank 0.

Rank 0 listens on a port that the kernel picks, so two launches never compete for one. It publishes its address where
the others look: in a file that all of them can read, or in the store that the launcher provides.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, final

import psutil

from headway.dist.environment import LaunchEnvironment
from headway.errors import MissingExtra, UsageError
from headway.system import files, ownership
from headway.system.environment import runs_root
from headway.system.log import logger

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = ("127.0.0.1", "::1")
"""addresses that every host has, and that never reach another host"""
_MAPPED = "::ffff:"
"""prefix of an IPv4 address that is written as an IPv6 one"""
_BACKLOG = 4096
"""how many connections may wait until they are accepted: thousands of ranks join at once"""


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """How to reach the hub in rank 0's process: hosts to try in order, a port, and the key of this launch."""

    hosts: tuple[str, ...]
    port: int
    key: bytes

    def to_json(self) -> str:
        return json.dumps({"hosts": self.hosts, "port": self.port, "key": self.key.hex()})

    @classmethod
    def from_json(cls, text: str) -> HubAddress:
        fields = json.loads(text)
        return cls(hosts=tuple(fields["hosts"]), port=int(fields["port"]), key=bytes.fromhex(fields["key"]))


class Rendezvous(ABC):
    """Where rank 0 publishes its address and the others find it."""

    @abstractmethod
    def publish(self, address: HubAddress) -> None: ...

    @abstractmethod
    def find(self) -> HubAddress | None:
        """Returns the address if it is published. It may be left over from an earlier launch: connecting then fails."""

    @abstractmethod
    def close(self) -> None:
        """Removes what was published. Rank 0 calls it when all ranks have joined."""


@final
class FileRendezvous(Rendezvous):
    """A file that only this user can read, on storage that all ranks share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made_directory = False

    def publish(self, address: HubAddress) -> None:
        for _ in range(10):  # another launch may remove the directory in the meantime, because it is empty
            try:
                self._made_directory |= _make_directory(self.path.parent)
                files.write_atomic(self.path, address.to_json().encode())
                return
            except FileNotFoundError as error:
                trouble = error
            except OSError as error:
                raise self._unwritable(error.strerror) from error
        raise self._unwritable(trouble.strerror) from trouble

    def check(self) -> None:
        """Raises unless this rank can write here; if only rank 0 raised, the others would wait until their timeout."""
        directory = self.path.parent
        try:
            nearest = directory if directory.exists() else directory.absolute().parent
            found = nearest.is_dir()
        except OSError as error:  # such as a directory that this user may not look into
            raise self._unwritable(error.strerror) from error
        if not (found and os.access(nearest, os.W_OK | os.X_OK)):
            raise self._unwritable("no such directory" if not nearest.exists() else "permission denied")

    def _unwritable(self, why: str | None) -> UsageError:
        return UsageError(
            f"the ranks cannot meet: {self.path.parent.absolute()} cannot be written ({why}); "
            f"set HEADWAY_RUNS to a directory that all ranks can write"
        )

    def find(self) -> HubAddress | None:
        try:
            # listing the directory discards what a network file system has cached: that the file does not exist
            list(self.path.parent.iterdir())
            return HubAddress.from_json(ownership.read_private(self.path).decode())
        except FileNotFoundError:
            return None

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._made_directory:
            with suppress(OSError):  # not empty: other launches use it
                self.path.parent.rmdir()


def _make_directory(path: Path) -> bool:
    try:
        files.make_dir(path)
    except FileExistsError:
        return False
    return True


@final
class StoreRendezvous(Rendezvous):
    """A key in the store of torchrun, or in the one behind a user's MASTER_ADDR.

    Every user of the node can read that store. Ranks on one node share its file system, so there the key of the launch
    is in a file that only this user can read, and the store has the path.
    """

    _KEY = "headway/hub"

    def __init__(self, store: Store, *, one_node: bool) -> None:
        self._store = store
        self._one_node = one_node
        self._key_file: Path | None = None

    def publish(self, address: HubAddress) -> None:
        fields = json.loads(address.to_json())
        if self._one_node:
            fd, name = tempfile.mkstemp(prefix="headway-key-")  # mode 0600
            self._key_file = Path(name)
            with os.fdopen(fd, "w") as file:
                file.write(fields["key"])
            fields["key"] = name
        self._store.set(self._KEY, json.dumps(fields))

    def find(self) -> HubAddress | None:
        from torch.distributed import DistStoreError

        try:
            fields = json.loads(self._store.get(self._KEY))  # waits for the key
        except DistStoreError:  # the wait timed out
            return None
        if self._one_node:
            try:
                fields["key"] = ownership.read_private(Path(fields["key"]), secret=True).decode()
            except FileNotFoundError:
                return None
        return HubAddress.from_json(json.dumps(fields))

    def close(self) -> None:
        if self._key_file is not None:  # without it, the address in the store is useless
            self._key_file.unlink(missing_ok=True)


def file_rendezvous(launch: LaunchEnvironment) -> FileRendezvous:
    """Returns the file through which the ranks of this launch find each other."""
    if launch.rendezvous_file is not None:
        return FileRendezvous(launch.rendezvous_file)
    name = launch.launch_id or _mpi_launch_id()
    return FileRendezvous(runs_root() / f".meeting-{name}")


def _mpi_launch_id() -> str:
    """Gets from MPI itself a name that all ranks share, for launchers that set no such variable."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise MissingExtra(
            "mpi4py", extra="mpi", purpose="to find the other ranks under this mpiexec"
        ) from None
    return f"mpi-{MPI.COMM_WORLD.bcast(secrets.token_hex(8))}"


def listen(launch: LaunchEnvironment) -> tuple[socket.socket, tuple[str, ...]]:
    """Opens a port that the kernel picks; returns it, and the names under which other hosts may reach it."""
    if launch.local_world_size == launch.world_size:
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG), ("127.0.0.1",)
    return listen_on(launch.master or socket.gethostname())


def check_loopback() -> None:
    """Raises `UsageError` if processes of this host cannot reach each other, as in a container without a loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK[0], 9))  # sends nothing
        except OSError as error:
            raise UsageError(
                f"ranks on this host cannot reach each other at {LOOPBACK[0]} ({error.strerror}): it has no loopback "
                "interface; start it with: ip link set lo up"
            ) from error


def listen_on(name: str | None) -> tuple[socket.socket, tuple[str, ...]]:
    """Opens a port for other hosts: at one address, if `name` resolves to exactly one address of this host.

    Otherwise it is not known on which network other hosts reach this one: the port is open on all, and this is logged.
    """
    address = own_address(name) if name else None
    if name == socket.gethostname() and address in (None, *LOOPBACK) and _resolves_to_loopback(name):
        only = _own_addresses(socket.AF_INET)
        address = only[0] if len(only) == 1 else None
    if name and address and address not in LOOPBACK:  # the loopback is of no use to other hosts
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        return server, tuple(dict.fromkeys((name, address)))
    _report_open(name)
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=_BACKLOG)
    names = [name, socket.gethostname(), *_own_addresses(socket.AF_INET)]
    return server, tuple(dict.fromkeys(name for name in names if name))


def _resolves_to_loopback(name: str) -> bool:
    """Whether a name stands for this host alone, such as 127.0.1.1 where Debian was installed."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ip_address(each.removeprefix(_MAPPED)).is_loopback for each in found)


@cache
def _report_open(name: str | None) -> None:
    logger.info(
        "%s does not resolve to exactly one address of this host, so ports for other nodes are open on all of its "
        "networks, to all who have the key of the launch",
        name,
    )


def interface_toward(host: str) -> str | None:
    """Returns the interface whose address `host` is, or through which it is reached; None if that is the loopback."""
    try:
        target = str(socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses) and not ip_address(own).is_loopback:
            return name
    return None


def own_address(name: str) -> str | None:
    """Returns the one address of this host to which a name resolves; None if it resolves to others, or to several.

    If a name has one IPv4 and one IPv6 address, the IPv4 address is returned: hosts that connect by name try both.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        resolved = (str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        found = {address.removeprefix(_MAPPED) for address in resolved}
    except OSError:  # it does not resolve here
        return None
    if found <= {*LOOPBACK}:
        return min(found)
    version4 = {address for address in found if ":" not in address} or found
    own = {*_own_addresses(socket.AF_INET), *_own_addresses(socket.AF_INET6)}
    return version4.pop() if len(version4) == 1 and found <= own else None


def _own_addresses(family: socket.AddressFamily) -> list[str]:
    """Returns this host's addresses without the loopback, since host names do not resolve everywhere."""
    addresses = (each for interface in psutil.net_if_addrs().values() for each in interface)
    texts = [each.address for each in addresses if each.family == family]
    return [text for text in texts if not text.startswith("127.") and text != "::1"]
