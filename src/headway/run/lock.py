"""One trainer per run directory, also where file locks do not reach other hosts.

    lock/flock               held by the owner; the kernel frees it when the owner dies, even by kill -9
    lock/owner-00003.json    who took the run the third time; the highest number owns it

To take the run is to publish the next number, which exactly one process on any host can do; no file is used
twice. The owner rewrites a counter in its file every second. Whoever finds an owner that did not release the
run takes it only on evidence that this owner is gone. Clocks of different hosts are never compared:

    an earlier start of our own job, or a job that is over          free
    flock is held, or the owner lives on this machine               locked
    released, or dead on this machine                               free
    a suspended job                                                 locked
    otherwise, if the counter moves within 10 s of our own clock    locked, and if not: taken, with a note

An owner that was replaced ends within seconds: what it writes is in the way of the one who replaced it. A node that was
cut off from its scheduler may hold one, and its flock, too.
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
from headway.system.locks import FileLock, ProcessIdentity, is_unsupported

BEAT = 1.0  # seconds between two beats of the owner's counter
REPLACED = 5.0  # seconds that an owner who was replaced may live on, to find it out by itself and say so
PATIENCE = 10.0  # seconds without a beat until an owner counts as gone: one that holds the GIL misses a few


@final
@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a run, in terms that another process, maybe on another host, can check."""

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
        """The owner in a record; None when it is damaged, half-written or of another version."""
        try:
            values = json.loads(record)
            job = JobIds.from_dict(values)
            ids = values.pop("ids", None) or values.pop("slurm", None)  # "slurm": as older versions wrote it
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
        """The record, padded: it is rewritten in place and must not leave a tail of its older self."""
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
    """A lock in two plain values; see `RunLock.check`."""

    directory: str
    number: int

    def check(self) -> None:
        directory = Path(self.directory)
        newest = _newest(directory)
        if newest > self.number:
            taker = Owner.read(_owner_file(directory, newest).read_bytes())
            raise RunLocked(_taken_over(directory, taker))


@final
class RunLock:
    """A run that is ours. `note` says what the user should know about how it became so; usually nothing."""

    def __init__(self, directory: Path, number: int, owner: Owner, flock: FileLock, note: str | None) -> None:
        self.note = note
        self._directory, self._number, self._owner, self._flock = directory, number, owner, flock
        self._file = files.open_private(_owner_file(directory, number), os.O_WRONLY)
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._keep_beating, name="headway-run-lock", daemon=True)
        self._heart.start()
        # A data worker forked from us shares our lock and would keep it after our death.
        register_after_fork(self, RunLock._close)

    @property
    def fence(self) -> Fence:
        """What another process of ours needs to know whether the run is still ours."""
        return Fence(directory=str(self._directory), number=self._number)

    def check(self) -> None:
        """Raises `RunLocked` if another process took the run, as it may when we were stopped for long.

        Call it before making something final, like the commit of a checkpoint.
        """
        self.fence.check()

    def release(self) -> None:
        """Lets the next process in. Does nothing in a forked child: the run is the parent's."""
        if os.getpid() != self._owner.pid or self._stop.is_set():
            return
        self._stop.set()
        self._heart.join()
        # When this cannot be written, closing still frees the run; a process elsewhere waits a little longer.
        with suppress(OSError):
            self._write(released=True)
        self._close()

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT):
            # A file system that fails for a while must not end the heartbeat; training will notice by itself.
            with suppress(OSError):
                self._write(beat=self._owner.beat + 1)
                self._end_if_replaced()

    def _end_if_replaced(self) -> None:
        """Leaves the main thread some seconds to find it out by itself; it may be stuck in a collective."""
        newest = _newest(self._directory)
        if newest <= self._number:
            return
        taker = Owner.read(_owner_file(self._directory, newest).read_bytes())
        ourselves = taker and (taker.machine, taker.pid) == (self._owner.machine, self._owner.pid)
        if ourselves or self._stop.wait(REPLACED):
            return
        os.write(2, f"headway: {_taken_over(self._directory, taker)}\n".encode())
        os._exit(RunLocked.exit_code)

    def _write(self, **changes: Any) -> None:
        self._owner = dataclasses.replace(self._owner, **changes)
        os.pwrite(self._file, self._owner.record(), 0)
        os.fsync(self._file)  # other hosts see it only when it has left ours

    def _close(self) -> None:
        """Once only: children forked after our release come here, too, where the numbers are other files by now."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self._flock.close()


@contextmanager
def hold(directory: Path, *, attempt: int, patience: float = PATIENCE) -> Iterator[RunLock]:
    """Holds the run whose lock files are in `directory`, or raises `RunLocked` naming who does.

    with hold(run.path / "lock", attempt=1) as lock:
        print(lock.note or "nobody was here")
    """
    with files.storage(f"lock {directory.parent}"):
        lock = _acquire(directory, attempt, patience)
    try:
        yield lock
    finally:
        lock.release()


def newest_owner(directory: Path) -> Owner | None:
    """Who held the run last, for those who only look; None if nobody did, or the record cannot be read."""
    try:
        number = _newest(directory)
        return Owner.read(_owner_file(directory, number).read_bytes()) if number else None
    except OSError:
        return None


def _acquire(directory: Path, attempt: int, patience: float) -> RunLock:
    with suppress(FileExistsError):
        files.make_dir(directory)
    me = Owner(**ProcessIdentity.of().to_dict(), attempt=attempt, job=schedulers.detect())
    flock = FileLock.open(directory / "flock")
    try:
        number, note = _newest(directory), None
        if not _try_flock(flock) and not _is_earlier_start(directory, number, me):
            raise _in_use(directory, number)
        while True:
            if number:
                note = _note_if_gone(directory, number, me, patience)
            if files.publish(_owner_file(directory, number + 1), me.record()):
                return RunLock(directory, number + 1, me, flock, note)
            number += 1  # somebody was faster: look at who
    except BaseException:
        flock.close()
        raise


def _is_earlier_start(directory: Path, number: int, me: Owner) -> bool:
    """Whether the owner is an earlier start of our own job, perhaps on a node that the scheduler has given up."""
    owner = Owner.read(_owner_file(directory, number).read_bytes()) if number else None
    return owner is not None and schedulers.is_earlier_start(owner.job, me.job)


def _taken_over(directory: Path, taker: Owner | None) -> str:
    return (
        f"run {directory.parent.name} was taken over by {taker or 'another process'} "
        "while this process stood still; this process must stop"
    )


def _note_if_gone(directory: Path, number: int, me: Owner, patience: float) -> str | None:
    """Raises `RunLocked` unless the owner is gone; returns a line about it if that is only very likely."""
    file = _owner_file(directory, number)
    first = file.read_bytes()
    owner = Owner.read(first)
    gone = owner and _is_gone(owner, me)
    if gone is False:
        raise _in_use(directory, number)
    deadline = time.monotonic() + patience
    while not gone:
        if time.monotonic() > deadline:
            return f"took the run over from {owner or 'an unknown owner'}: no heartbeat for {patience:g} s"
        time.sleep(BEAT / 4)
        now = file.read_bytes()
        owner = Owner.read(now)
        gone = owner and owner.released
        if now != first and not gone:
            raise _in_use(directory, number)
    return None


def _is_gone(owner: Owner, me: Owner) -> bool | None:
    """True and False on evidence, None without."""
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
    return True  # where the file system has no locks, the owner files must do


def _newest(directory: Path) -> int:
    """The highest owner number, 0 when there is none."""
    names = (re.fullmatch(r"owner-(\d+)\.json", path.name) for path in directory.iterdir())
    return max((int(name[1]) for name in names if name), default=0)


def _owner_file(directory: Path, number: int) -> Path:
    return directory / f"owner-{number:05d}.json"


def _in_use(directory: Path, number: int) -> RunLocked:
    owner = Owner.read(_owner_file(directory, number).read_bytes()) if number else None
    stop = f"stop it ({schedulers.cancel_command(owner.job)})" if owner and owner.job else "stop it"
    return RunLocked(
        f"run {directory.parent.name} is in use by {owner or 'another process'}; "
        f"wait for it to end, {stop}, or start a new run"
    )
