"""Finds what a test left behind: processes, sockets, files, shared memory, variables, handlers, streams, threads.

    before = snapshot()
    ...
    assert since(before) == []

Where the system has no /proc (macOS), open files and shared memory are not seen.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
_SHARED_MEMORY = Path("/dev/shm")
_SETTLE_S = 2.0
"""how long children and sockets may take to disappear, times the load per CPU"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4
"""between two checks, each of which collects all garbage"""
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class ResourceSnapshot:
    """The resources of this process at one moment: identities, with descriptions."""

    processes: Mapping[Hashable, str]
    files: Mapping[Hashable, int]
    shared_memory: frozenset[Path] | None
    threads: Mapping[Hashable, str]
    variables: Mapping[str, object]
    handlers: Mapping[str, object]
    streams: Mapping[str, object]
    ignored: frozenset[str]
    """variables that are not compared"""


def snapshot(*, shared_memory: bool = True, except_variables: Collection[str] = ()) -> ResourceSnapshot:
    """Returns the resources of this process. Shared memory belongs to the user, not the process: ranks leave it out."""
    ignored = {"PYTEST_CURRENT_TEST", *except_variables}
    children = psutil.Process().children(recursive=True)
    trackers = [child for child in children if is_resource_tracker(child)]
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    return ResourceSnapshot(
        processes={(c.pid, c.create_time()): _describe_process(c) for c in children if c not in trackers},
        files=_open_files(except_those_of=trackers),
        shared_memory=own_shared_memory() if shared_memory else None,
        threads={thread.ident: thread.name for thread in threads},
        variables={
            name: value
            for name, value in os.environ.items()
            if name not in ignored and not name.lstrip("_").startswith("TORCHINDUCTOR_")  # set on first use
        },
        handlers={_signal_name(number): _handler(number) for number in signal.valid_signals()},
        streams={"sys.stdout": sys.stdout, "sys.stderr": sys.stderr},
        ignored=frozenset(ignored),
    )


def since(before: ResourceSnapshot, *, settle_s: float | None = None) -> list[str]:
    """Returns one line for each thing that is new, after waiting up to `settle_s` seconds for it to disappear.

    By default it waits for 2 s; on a busy machine, for 2 s times the load per CPU.
    """
    memory = before.shared_memory is not None
    found = _once_settled(
        lambda: _compare(before, snapshot(shared_memory=memory, except_variables=before.ignored)), settle_s
    )
    sockets = _sockets() if any(isinstance(each, int) for each in found) else {}
    return [each if isinstance(each, str) else sockets.get(each) or _describe_file(each) for each in found]


def shared_memory_since(before: frozenset[Path]) -> list[str]:
    """Returns one line for each piece of new shared memory that only this process and its children use."""
    return _once_settled(lambda: _compare_memory(before, own_shared_memory()))


def describe(found: Iterable[str]) -> str:
    """Formats the message of a test that fails because of what it left behind.

    >>> print(describe(["process 4711: sleep 100"]))
    the test left something behind:
      process 4711: sleep 100
    """
    return "the test left something behind:\n" + "\n".join(f"  {line}" for line in found)


def _once_settled(look: Callable[[], list[T]], settle_s: float | None = None) -> list[T]:
    if settle_s is None:
        settle_s = _SETTLE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    deadline, pause = time.monotonic() + settle_s, _FIRST_PAUSE_S
    while found := look():
        if time.monotonic() > deadline:
            return found
        gc.collect()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return []


def _compare_memory(before: frozenset[Path], after: frozenset[Path]) -> list[str]:
    return [f"shared memory {path}" for path in sorted(after - before) if _is_ours(path)]


def _compare(before: ResourceSnapshot, after: ResourceSnapshot) -> list[str | int]:
    """Returns a line for each new resource; for a file its descriptor, because describing sockets is slow."""
    return [
        *(f"process {command}" for key, command in after.processes.items() if key not in before.processes),
        *(fd for key, fd in after.files.items() if key not in before.files),
        *_compare_memory(before.shared_memory or frozenset(), after.shared_memory or frozenset()),
        *(f"thread {name}" for key, name in after.threads.items() if key not in before.threads),
        *(f"environment variable {name}" for name in _changed(before.variables, after.variables)),
        *(f"handler of {name}" for name in _changed(before.handlers, after.handlers)),
        *(f"{name}, which was replaced" for name in _changed(before.streams, after.streams)),
    ]


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name, _ABSENT) != after.get(name, _ABSENT)]


def is_resource_tracker(child: psutil.Process) -> bool:
    """Returns whether a child is multiprocessing's resource tracker, which lives as long as the process."""
    try:
        return any("multiprocessing.resource_tracker" in part for part in child.cmdline())
    except psutil.Error:  # gone, or a zombie
        return False


def _describe_process(child: psutil.Process) -> str:
    try:
        return f"{child.pid} ({' '.join(child.cmdline())})"
    except psutil.ZombieProcess:
        return f"{child.pid} (ended, but was not waited for)"
    except psutil.Error:
        return f"{child.pid} (gone meanwhile)"


def _open_files(except_those_of: Iterable[psutil.Process]) -> Mapping[Hashable, int]:
    """Returns (target, how many before it) -> descriptor: a file that was reopened under another number is not new."""
    shared = {
        target for child in except_those_of for target in _targets(Path(f"/proc/{child.pid}/fd")).values()
    }
    seen: Counter[str] = Counter()
    files: dict[Hashable, int] = {}
    for fd, target in sorted(_targets(Path("/proc/self/fd")).items()):
        if not (target in shared and target.startswith("pipe:")):
            seen[target] += 1
            files[target, seen[target]] = fd
    return files


def _targets(directory: Path) -> dict[int, str]:
    found = {}
    for entry in directory.iterdir() if directory.is_dir() else ():
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            found[int(entry.name)] = str(entry.readlink())
    return found


def _sockets() -> dict[int, str]:
    """Returns descriptor -> description. This is slow: the kernel lists the connections of all processes."""
    found = {}
    for connection in psutil.Process().net_connections(kind="inet"):
        ends = [f"{address.ip}:{address.port}" for address in (connection.laddr, connection.raddr) if address]
        found[connection.fd] = f"socket {' to '.join(ends)} ({connection.status.lower()})"
    return found


def _describe_file(fd: int) -> str:
    return f"open file {fd}: {_targets(Path('/proc/self/fd')).get(fd, 'closed meanwhile')}"


def own_shared_memory() -> frozenset[Path]:
    """Returns the shared memory of this user, whichever process made it."""
    found = set()
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                found.add(path)
    return frozenset(found)


def _is_ours(path: Path) -> bool:
    """Returns whether this process or its children made the memory, judged by the processes that use it."""
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    users = {process.pid for process in psutil.process_iter() if _uses(process.pid, path)}
    if users - family:
        return False
    if path.is_dir():  # of any program, unless it is a node cache
        return path.name.startswith("headway")
    # multiprocessing's names are random: unused memory may be left from any killed process of this user
    return bool(users) or not path.name.startswith(("psm_", "sem.mp-"))


def _uses(pid: int, path: Path) -> bool:
    with suppress(OSError):  # gone, or another user's
        mapped = str(path) in Path(f"/proc/{pid}/maps").read_text()
        return mapped or str(path) in _targets(Path(f"/proc/{pid}/fd")).values()
    return False


def _handler(number: int) -> object:
    """Returns a handler; the one that torch installs for its data workers counts as none."""
    handler = signal.getsignal(number)
    module = getattr(handler, "__module__", None) or ""
    return signal.SIG_DFL if module.startswith("torch.") else handler


def _signal_name(number: int) -> str:
    return number.name if isinstance(number, signal.Signals) else f"signal {number}"
