"""`ReaderPool`: processes that read samples for this one, into shared memory.

If one of them ends or cannot be started, this process reads the samples itself.
"""

from __future__ import annotations

import heapq
import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np

import headway
from headway.data.sources.reader_process import SLOT_BYTES, ReaderSettings, SlotAnswer
from headway.dist.control.signals import block_signals
from headway.system.files import open_unnamed
from headway.system.locks import block_forks
from headway.system.log import logger

_SLOTS = 256  # a slot takes memory when it is first used, and low numbers are used first
_ANSWER_WAIT_S, _EXIT_WAIT_S = 60.0, 5.0  # a process starts in about half a second
_PROGRAM = (
    "import sys; sys.path.insert(0, {home!r}); import headway; sys.path[:1] = []; sys.path += {paths!r}; "
    "from headway.data.sources.reader_process import main; main()"
)
MAX_DECODERS = 4
"""processes that decode for a rank: one interpreter cannot collate small samples faster than these decode them"""


class Pinning(Protocol):
    """Pins memory of this process for a GPU."""

    def pin(self, address: int, count: int, /) -> None: ...
    def unpin(self, address: int, /) -> None: ...


class FilledSlot(NamedTuple):
    """A slot with the samples that a reader process has read into it."""

    memory: memoryview
    """the slot's bytes; the slot is used again when no view of them is left"""
    answer: SlotAnswer


@final
class SharedSlots:
    """Memory that is shared with reader processes, in slots of equal size. Thread-safe.

    With `pinning`, a slot is pinned when it is first used.
    """

    def __init__(self, pinning: Pinning | None = None) -> None:
        self.descriptor = open_unnamed("headway-samples")
        try:
            os.ftruncate(self.descriptor, _SLOTS * SLOT_BYTES)
            self._memory = np.frombuffer(mmap.mmap(self.descriptor, _SLOTS * SLOT_BYTES), np.uint8)
        except OSError:
            os.close(self.descriptor)
            raise
        self._pinning, self._pinned, self._free = pinning, set[int](), list(range(_SLOTS))
        self._lock, self._returned, self._pins = threading.Lock(), deque[int](), pinning is not None
        weakref.finalize(self, _release, self.descriptor, self._memory, self._pinned, pinning).atexit = False

    def take(self) -> int | None:
        """Returns a slot that is free; None if there is none."""
        with self._lock:
            while self._returned:
                heapq.heappush(self._free, self._returned.popleft())
            if not self._free:
                return None
            slot = heapq.heappop(self._free)
        address = self._memory.ctypes.data + slot * SLOT_BYTES
        if self._pins and address not in self._pinned:
            self._pin(address)
        return slot

    def _pin(self, address: int) -> None:
        assert self._pinning is not None
        try:
            self._pinning.pin(address, SLOT_BYTES)
        except RuntimeError as error:  # raised by CUDA above the limit of locked memory
            with self._lock:
                pinned_before, self._pins = self._pins, False
            if pinned_before:
                logger.warning(
                    f"memory for samples cannot be pinned ({error}); a GPU decodes them more slowly"
                )
        else:
            self._pinned.add(address)

    def free(self, slot: int) -> None:
        """Frees a slot. Does not take the lock: the garbage collector may call this while a thread holds it."""
        self._returned.append(slot)

    def view(self, slot: int) -> memoryview:
        """Returns the memory of a slot, which becomes free when no view of it is left."""
        memory = self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        weakref.finalize(memory, self.free, slot).atexit = False
        return memory.data


def _release(descriptor: int, memory: Any, pinned: set[int], pinning: Pinning | None) -> None:
    if pinning is not None:
        for address in pinned:
            pinning.unpin(address)
    os.close(descriptor)
    del memory


@final
class _ReaderProcess:
    """A running reader process, which one thread at a time uses."""

    def __init__(self, settings: str, memory: int) -> None:
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(_ANSWER_WAIT_S), int(_ANSWER_WAIT_S % 1 * 1e6))  # a timeval
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, way, limit)
        given = open_unnamed("headway-settings")
        try:
            with open(given, "w", closefd=False) as file:
                file.write(settings)
            os.lseek(given, 0, os.SEEK_SET)
            passed = theirs.fileno(), given, memory
            # a fork at this moment would keep a pipe open that this call waits for; signals are meant for the rank, and
            # stay blocked in the process
            with block_forks(), block_signals():
                self._process = subprocess.Popen(
                    [sys.executable, *_interpreter_arguments(), *map(str, passed)],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
        finally:
            theirs.close()
            os.close(given)
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._ready, self._start_limit_s = False, time.monotonic() + _ANSWER_WAIT_S

    def is_ready(self) -> bool:
        """Whether it has started. Raises EOFError or OSError if it has ended, or takes too long."""
        if self._ready:
            return True
        if self._connection.poll():
            self._connection.recv()
            self._ready = True
        elif time.monotonic() > self._start_limit_s:
            raise self._late()
        return self._ready

    def read(self, slot: int, locations: Sequence[tuple[int, int, int, int]]) -> SlotAnswer:
        """Makes the process read samples. Raises EOFError or OSError if it has ended, or does not answer."""
        try:
            if not self._ready:
                self._connection.recv()
                self._ready = True
            self._connection.send((slot, locations))
            return SlotAnswer(*self._connection.recv())
        except BlockingIOError as error:
            raise self._late() from error

    def _late(self) -> TimeoutError:
        self._process.kill()  # also if it is stopped
        return TimeoutError(f"process {self._process.pid} did not answer in {_ANSWER_WAIT_S:g} s")

    def shut_down(self) -> None:
        """Makes the process exit, even if a fork of this process also has the connection."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        self._socket.close()

    def wait(self, deadline: float) -> None:
        """Waits for the process to exit, and kills it at the deadline: it may be blocked by storage."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_WAIT_S)


def _interpreter_arguments() -> list[str]:
    """Returns arguments with which a reader process imports this very headway.

    All other modules come from the interpreter's own path first, and then from ours: entries that a script put at the
    front of `sys.path` are not meant for the process.
    """
    home = str(Path(headway.__file__).resolve().parents[1])
    paths = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    return ["-I" if sys.flags.isolated else "-P", "-c", _PROGRAM.format(home=home, paths=paths)]


def _end(processes: Sequence[_ReaderProcess], owner: int) -> None:
    if os.getpid() == owner:  # and not in a fork
        for each in processes:
            each.shut_down()
    for each in processes:
        each.close()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for each in processes if os.getpid() == owner else ():
        each.wait(deadline)


@final
class ReaderPool:
    """Starts processes that read samples: one for each concurrent request, and at most `max_processes`.

    With `waits`, the first request waits until its process has started; without, `read` returns None until then.
    """

    def __init__(
        self,
        settings: ReaderSettings,
        pinning: Pinning | None = None,
        *,
        max_processes: int = 2**16,
        waits: bool = True,
    ) -> None:
        self._settings, self._pinning, self._waits, self._owner = settings, pinning, waits, os.getpid()
        self._processes, self._idle = list[_ReaderProcess](), deque[_ReaderProcess]()
        self._lock, self._turns = threading.Lock(), threading.BoundedSemaphore(max_processes)
        self._failed = not sys.executable or getattr(sys, "frozen", False)  # nothing can be started
        self._slots: SharedSlots | None = None
        weakref.finalize(self, _end, self._processes, self._owner)

    @property
    def usable(self) -> bool:
        """Whether processes can read for this one. A fork cannot use them: it would take its parent's answers."""
        return not self._failed and os.getpid() == self._owner

    def read(self, locations: Sequence[tuple[int, int, int, int]]) -> FilledSlot | None:
        """Reads as many of the first samples as fit a slot; None if no process or no slot is available."""
        if not self.usable:
            return None
        with self._turns:
            if self._failed:  # while this thread waited
                return None
            try:
                process, slots = self._take()
                if not (self._waits or process.is_ready()):
                    self._idle.appendleft(process)  # the others are tried first
                    return None
                slot = slots.take()
                answer = process.read(slot, locations) if slot is not None else None
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._give_up(error)  # its slot is not freed: the process may still write to it
                return None
            self._idle.append(process)
        return FilledSlot(slots.view(slot), answer) if slot is not None and answer is not None else None

    def _take(self) -> tuple[_ReaderProcess, SharedSlots]:
        with self._lock:
            if self._slots is None:
                self._slots = SharedSlots(self._pinning)
            if self._idle:
                return self._idle.pop(), self._slots
            process = _ReaderProcess(self._settings.to_json(), self._slots.descriptor)
            self._processes.append(process)
            return process, self._slots

    def _give_up(self, error: Exception) -> None:
        """Stops all processes: what made one of them fail will probably make the others fail, too."""
        with self._lock:
            failed_before, self._failed = self._failed, True
            for process in self._processes:
                process.shut_down()
        if not failed_before:
            reason = str(error) or "it ended"
            logger.warning(
                f"a process that reads samples failed ({reason}); threads read them instead, more slowly"
            )
