"""Where ranks that know only each other's number find rank 0.

Rank 0 listens on a port that the kernel picked, so two launches never want the same one, and leaves its address where
the others look: in a file that all of them can read, or in the store that the launcher brought along.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import psutil

from headway.dist.environment import LaunchEnvironment
from headway.errors import MissingExtra, UsageError
from headway.system import files

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """How to reach rank 0: names to try in order, a port, and the key that proves it is ours."""

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
    """A place to leave rank 0's address, and to find it."""

    @abstractmethod
    def publish(self, address: HubAddress) -> None: ...

    @abstractmethod
    def look(self) -> HubAddress | None:
        """The address, if it is there. It may be that of a launch long dead: whoever connects finds out."""

    @abstractmethod
    def close(self) -> None:
        """Called by rank 0 when all have come."""


@final
class FileRendezvous(Rendezvous):
    """A file that only this user can read, on storage that all ranks share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made_folder = False

    def publish(self, address: HubAddress) -> None:
        for _ in range(10):  # another launch may take away the folder, which it found empty, under our hands
            try:
                self._made_folder |= _make_folder(self.path.parent)
                files.write_atomic(self.path, address.to_json().encode())
                return
            except FileNotFoundError as error:
                trouble = error
            except OSError as error:
                raise self._unwritable(error.strerror) from error
        raise self._unwritable(trouble.strerror) from trouble

    def check(self) -> None:
        """Every rank looks for itself whether they can meet here, lest the others wait for a rank 0 that cannot."""
        folder = self.path.parent
        nearest = folder if folder.exists() else folder.absolute().parent
        if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
            raise self._unwritable("no such folder" if not nearest.exists() else "permission denied")

    def _unwritable(self, why: str | None) -> UsageError:
        return UsageError(
            f"the ranks cannot meet: {self.path.parent.absolute()} cannot be written ({why}); "
            f"set HEADWAY_RUNS to a folder that all ranks can write"
        )

    def look(self) -> HubAddress | None:
        try:
            # reading the folder makes a network file system forget that the file was not there a moment ago
            list(self.path.parent.iterdir())
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise UsageError(
                        f"{self.path} belongs to another user: it is not our meeting point; remove it"
                    )
                return HubAddress.from_json(file.read())
        except FileNotFoundError:
            return None

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):  # not empty: it has become of use to others
                self.path.parent.rmdir()


def _make_folder(path: Path) -> bool:
    try:
        files.make_dir(path)
    except FileExistsError:
        return False
    return True


@final
class StoreRendezvous(Rendezvous):
    """A key in the store that torchrun, or a user's MASTER_ADDR, brought along."""

    _KEY = "headway/hub"

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, address: HubAddress) -> None:
        self._store.set(self._KEY, address.to_json())

    def look(self) -> HubAddress | None:
        return HubAddress.from_json(self._store.get(self._KEY).decode())  # waits for the key

    def close(self) -> None:
        pass  # the key is of use to nobody else, and goes with the store


def file_rendezvous(place: LaunchEnvironment) -> FileRendezvous:
    """The file in which the ranks of this launch meet."""
    if given := os.environ.get("HEADWAY_RENDEZVOUS"):
        return FileRendezvous(Path(given))
    name = place.launch_id or _mpi_launch_id()
    return FileRendezvous(Path(os.environ.get("HEADWAY_RUNS", "runs")) / f".meeting-{name}")


def _mpi_launch_id() -> str:
    """Asks MPI itself for a name that all ranks share, where its launcher put none into the environment."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise MissingExtra(
            "mpi4py", extra="mpi", purpose="to find the other ranks under this mpiexec"
        ) from None
    return f"mpi-{MPI.COMM_WORLD.bcast(secrets.token_hex(8))}"


def listen(place: LaunchEnvironment) -> tuple[socket.socket, tuple[str, ...]]:
    """Opens a port of the kernel's choice and tells under which names others may reach it."""
    if place.local_world_size == place.world_size:
        return socket.create_server(("127.0.0.1", 0), backlog=1024), ("127.0.0.1",)
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=4096)
    names = [place.master, socket.gethostname(), *_own_addresses()]
    return server, tuple(dict.fromkeys(name for name in names if name))


def _own_addresses() -> list[str]:
    """This host's addresses that other hosts may reach. Names do not resolve everywhere; numbers need not."""
    found = []
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                found.append(address.address)
    return found
