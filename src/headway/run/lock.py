"""One training process per run directory, even where file locks do not reach other hosts.

    lock/flock               held by the owner; the kernel releases it when the owner ends, even by kill -9
    lock/owner-00003.json    the third owner of the run; the highest number is the current one

A process takes the run by publishing the next number, which exactly one process on any host can do; no file is used
twice. The owner increments a counter in its file every second. A process that finds an owner that has not released
the run takes it only on evidence that this owner is gone. It never compares clocks of different hosts:

    an earlier start of our own job, or a job that is over           free
    flock is held, or the owner runs on this machine                 locked
    released, or no longer running on this machine                   free
    a suspended job                                                  locked
    otherwise, if the counter changes within 10 s of our own clock   locked, and if not: taken, with a note

An owner that was replaced, or whose run was removed, exits within seconds. A node that was cut off from its scheduler
may still run a replaced owner, which holds its flock. Until it exits, it writes nothing into the run: it calls
`Fence.check` before every write, or `Fence.check_successor` before rows, and processes that never held the run call
`check_free`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import RunLocked
from headway.schedulers.base import JobIds
from headway.system import files
from headway.system.jsonlines import parse_json
from headway.system.locks import FileLock, ProcessIdentity, is_unsupported

HEARTBEAT_S = 1.0
"""how often the owner increments its counter"""
_SILENCE_S = 10.0  # without a heartbeat until an owner counts as gone: one that holds the GIL misses a few
_LOST_S = (
    5.0  # for the main thread of an owner that lost its run to notice and report it, before this thread exits
)


@final
@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a run, in values that a process on another host can check."""

    host: str
    machine: str
    pid: int
    born: str | None
    attempt: int
    job: JobIds | None
    beat: int = 0
    released: bool = False

    @classmethod
    def read(cls, record: bytes) -> Owner | None:
        """Parses a record; None if it is damaged, half-written or from another version."""
        try:
            values = parse_json(record)
            job = JobIds.from_dict(values)
            ids = values.pop("ids", None)
            values.pop("scheduler", None)
            owner = cls(**values, job=job)
        except (ValueError, TypeError, AttributeError):
            return None
        return owner if isinstance(owner.pid, int) and (job is not None or not ids) else None

    @property
    def identity(self) -> ProcessIdentity:
        """The process that holds the run."""
        return ProcessIdentity(host=self.host, machine=self.machine, pid=self.pid, born=self.born)

    def record(self) -> bytes:
        """Returns the record, padded, since it is rewritten in place and must cover a longer one."""
        facts = dataclasses.asdict(self)
        del facts["job"]
        facts |= self.job.to_dict() if self.job else {}
        return json.dumps(facts).encode().ljust(1000) + b"\n"

    def __str__(self) -> str:
        job = f", {schedulers.describe(self.job)}" if self.job else ""
        return f"pid {self.pid} on {self.host} (attempt {self.attempt}{job})"


@final
@dataclass(frozen=True, kw_only=True)
class Fence:
    """A lock as two plain values, from which every process of an attempt checks whether it may write into the run."""

    directory: str
    number: int

    def check(self) -> None:
        """Raises `RunLocked` if another process took the run."""
        directory = Path(self.directory)
        newest = _newest(directory)
        if newest > self.number:
            raise RunLocked(_taken_over(directory, _read_owner(directory, newest)))

    def check_successor(self) -> None:
        """Checks the same in one system call, for what every rank writes at every log point.

        Owners are numbered consecutively. A network file system may show the next one later than `check` does, and a
        run that was removed has none.
        """
        directory = Path(self.directory)
        try:
            os.lstat(_owner_file(directory, self.number + 1))
        except FileNotFoundError:
            return
        raise RunLocked(_taken_over(directory, _read_owner(directory, self.number + 1)))


@final
class RunLock:
    """A run that this process holds. `note` is a line for the user if it was taken from another owner."""

    def __init__(
        self,
        directory: Path,
        number: int,
        owner: Owner,
        flock: FileLock,
        note: str | None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.note = note
        self._directory, self._number, self._owner, self._flock = directory, number, owner, flock
        self._heartbeat_s = heartbeat_s
        self._file = files.open_private(_owner_file(directory, number), os.O_WRONLY)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="headway-run-lock", daemon=True)
        self._thread.start()
        # a data worker that is forked from this process would keep the owner file open after it ends
        register_after_fork(self, RunLock._close)

    @property
    def fence(self) -> Fence:
        """The values from which other processes of this attempt check that it still holds the run."""
        return Fence(directory=str(self._directory), number=self._number)

    def check(self) -> None:
        """Raises `RunLocked` if another process took the run, as may happen while this one is suspended.

        Call it before an action that cannot be undone, such as the commit of a checkpoint.
        """
        self.fence.check()

    def release(self) -> None:
        """Releases the run. Does nothing in a forked child, whose parent holds the run."""
        if os.getpid() != self._owner.pid or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        # if this write fails, closing still releases the run; a process on another host waits a little longer
        with suppress(OSError):
            self._write(released=True)
        self._close()

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            # a file system that fails for a while must not end the heartbeat; training reports it
            with suppress(OSError):
                self._write(beat=self._owner.beat + 1)
            with suppress(OSError):
                self._exit_if_lost()

    def _exit_if_lost(self) -> None:
        """Exits if this process lost the run and its main thread, perhaps stuck in a collective, did not notice."""
        if self._why_lost() is None or self._stop.wait(_LOST_S):
            return
        if why := self._why_lost():  # a mount may have been away
            os.write(2, f"headway: {why}\n".encode())
            os._exit(RunLocked.exit_code)

    def _why_lost(self) -> str | None:
        """Returns why this process must stop; None as long as it holds the run."""
        try:
            newest = _newest(self._directory)
        except FileNotFoundError:
            name = self._directory.parent.name
            return f"run {name} was removed or moved while this process trained in it; this process must stop"
        if newest <= self._number:
            return None
        taker = _read_owner(self._directory, newest)
        ourselves = taker and (taker.machine, taker.pid) == (self._owner.machine, self._owner.pid)
        return None if ourselves else _taken_over(self._directory, taker)

    def _write(self, **changes: Any) -> None:
        self._owner = dataclasses.replace(self._owner, **changes)
        os.pwrite(self._file, self._owner.record(), 0)
        os.fsync(self._file)  # other hosts see the record only after this

    def _close(self) -> None:
        """Closes once: a child forked after the release calls this, too, when the descriptors may be other files."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self._flock.close()


@contextmanager
def hold(
    directory: Path, *, attempt: int, silence_s: float = _SILENCE_S, heartbeat_s: float = HEARTBEAT_S
) -> Iterator[RunLock]:
    """Holds the run whose lock files are in `directory`, or raises `RunLocked`, which names the owner.

    An owner on another host without a heartbeat for `silence_s` seconds counts as gone.

    with hold(run.lock_dir, attempt=1) as lock:
        print(lock.note or "the run was free")
    """
    with files.storage(f"lock {directory.parent}"):
        lock = _acquire(directory, attempt, silence_s, heartbeat_s)
    try:
        yield lock
    finally:
        lock.release()


def check_free(directory: Path) -> None:
    """Raises `RunLocked` if another process trains in the run. For a process that writes into it but never held it.

    Such processes are the agent and the job script of the ranks, and one that failed before it could take the run.
    """
    number = _newest(directory) if directory.is_dir() else 0
    if not number:
        return
    owner = _read_owner(directory, number)
    me = Owner(**ProcessIdentity.of().to_dict(), attempt=0, job=schedulers.detect())
    ours = owner and (owner.identity == me.identity or _is_same_start(owner.job, me.job))
    if not ours and not (owner and _is_gone(owner, me)):
        raise _in_use(directory, number)


def _is_same_start(job: JobIds | None, ours: JobIds | None) -> bool:
    """Returns whether both belong to one start of a job, as its ranks, agents and script do."""
    if job is None or ours is None:
        return False
    return (job.scheduler, job.cluster_name, job.start) == (ours.scheduler, ours.cluster_name, ours.start)


def newest_owner(directory: Path) -> Owner | None:
    """Returns the last owner of a run; None if there was none, or its record cannot be read."""
    with suppress(OSError):
        return _read_owner(directory, _newest(directory))
    return None


def _acquire(directory: Path, attempt: int, silence_s: float, heartbeat_s: float) -> RunLock:
    with suppress(FileExistsError):
        files.make_dir(directory)
    me = Owner(**ProcessIdentity.of().to_dict(), attempt=attempt, job=schedulers.detect())
    flock = FileLock.open(directory / "flock")
    try:
        number, note = _newest(directory), None
        if not _try_flock(flock) and not _is_over(directory, number, me, silence_s):
            raise _in_use(directory, number)
        while True:
            if number:
                note = _note_if_gone(directory, number, me, silence_s)
            if files.publish(_owner_file(directory, number + 1), me.record()):
                return RunLock(directory, number + 1, me, flock, note, heartbeat_s)
            number += 1  # another process was faster: check that owner
    except BaseException:
        flock.close()
        raise


def _is_over(directory: Path, number: int, me: Owner, silence_s: float) -> bool:
    """Returns whether the owner is an earlier start of our own job, or belongs to a job that is over, and is silent.

    It may live on a node that the scheduler gave up, and a file server keeps the lock of a node that has crashed. But a
    shell may outlive the job whose variables it has.
    """
    owner = _read_owner(directory, number)
    if owner is None:
        return False
    if schedulers.is_earlier_start(owner.job, me.job):
        return True
    if schedulers.is_gone(owner.job, me.job) is not True:
        return False
    time.sleep(silence_s)
    return _read_owner(directory, number) == owner


def _taken_over(directory: Path, taker: Owner | None) -> str:
    return (
        f"run {directory.parent.name} was taken over by {taker or 'another process'} "
        "while this process was suspended; this process must stop"
    )


def _note_if_gone(directory: Path, number: int, me: Owner, silence_s: float) -> str | None:
    """Raises `RunLocked` unless the owner is gone; returns a note if that is likely but not certain."""
    file = _owner_file(directory, number)
    first = files.read_regular(file)
    owner = Owner.read(first)
    gone = owner and _is_gone(owner, me)
    if gone is False:
        raise _in_use(directory, number)
    deadline = time.monotonic() + silence_s
    while not gone:
        if time.monotonic() > deadline:
            return f"took the run over from {owner or 'an unknown owner'}: no heartbeat for {silence_s:g} s"
        time.sleep(HEARTBEAT_S / 4)
        now = files.read_regular(file)
        owner = Owner.read(now)
        gone = owner and owner.released
        if now != first and not gone:
            raise _in_use(directory, number)
    return None


def _is_gone(owner: Owner, me: Owner) -> bool | None:
    """Returns True or False on evidence, None without."""
    if owner.released:
        return True
    alive = owner.identity.is_alive()
    if alive is not None:
        return not alive
    return schedulers.is_gone(owner.job, me.job)


def _try_flock(flock: FileLock) -> bool:
    try:
        return flock.try_acquire()
    except OSError as error:
        if not is_unsupported(error):
            raise
    return True  # on a file system without locks, the owner files must suffice


def _newest(directory: Path) -> int:
    """Returns the highest owner number; 0 if there is none."""
    names = (re.fullmatch(r"owner-(\d+)\.json", path.name) for path in directory.iterdir())
    return max((int(name[1]) for name in names if name), default=0)


def _owner_file(directory: Path, number: int) -> Path:
    return directory / f"owner-{number:05d}.json"


def _read_owner(directory: Path, number: int) -> Owner | None:
    """Returns the owner with this number; None for 0, or if its record is damaged."""
    return Owner.read(files.read_regular(_owner_file(directory, number))) if number else None


def _in_use(directory: Path, number: int) -> RunLocked:
    owner = _read_owner(directory, number)
    stop = f"stop it ({schedulers.cancel_command(owner.job)})" if owner and owner.job else "stop it"
    return RunLocked(
        f"run {directory.parent.name} is in use by {owner or 'another process'}; "
        f"wait for it to end, {stop}, or start a new run"
    )
