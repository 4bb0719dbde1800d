"""`ReaderPool`: processes that read samples for this one, and the memory that they read them into.

If one of them ends or cannot be started, this process reads by itself.
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
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from headway.data.sources.reader_process import SLOT_BYTES, ReaderSettings, SlotAnswer
from headway.dist.control.signals import block_signals
from headway.system.files import open_unnamed
from headway.system.log import logger

_SLOTS = 256  # take memory when they are first used, and those with low numbers are used first
_ANSWER_WAIT_S, _EXIT_WAIT_S = 60.0, 5.0  # it starts in about half a second
_PROGRAM = "import sys; sys.path[:] = {path}; from headway.data.sources.reader_process import main; main()"
MAX_DECODERS = 4
"""processes that decode for a rank: more would be faster than one interpreter makes batches of small samples"""


class Pinning(Protocol):
    """Makes memory of the process ready for a GPU."""

    def pin(self, address: int, count: int, /) -> None: ...
    def unpin(self, address: int, /) -> None: ...


class ReadAnswer(NamedTuple):
    """What a reader process has read."""

    memory: memoryview
    """the slot; it is used again when no view of it is left"""
    told: SlotAnswer


@final
class SharedSlots:
    """Memory that is shared with reader processes, in slots of equal size. Thread-safe.

    With `pinning`, a slot is pinned when it is first used.
    """

    def __init__(self, pinning: Pinning | None = None) -> None:
        self.descriptor = open_unnamed("headway-samples")
        os.ftruncate(self.descriptor, _SLOTS * SLOT_BYTES)
        self._memory = np.frombuffer(mmap.mmap(self.descriptor, _SLOTS * SLOT_BYTES), np.uint8)
        self._pinning, self._pinned, self._free = pinning, set[int](), list(range(_SLOTS))
        self._lock, self._returned, self._pins = threading.Lock(), deque[int](), pinning is not None
        weakref.finalize(self, _release, self.descriptor, self._memory, self._pinned, pinning).atexit = False

    def take(self) -> int | None:
        """Returns a slot that nobody uses; None if there is none."""
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

    @property
    def all_in_use(self) -> bool:
        """Whether there is no slot to take."""
        return not self._free and not self._returned

    def _pin(self, address: int) -> None:
        assert self._pinning is not None
        try:
            self._pinning.pin(address, SLOT_BYTES)
        except RuntimeError as error:  # of CUDA, where memory that is locked has a limit
            with self._lock:
                said, self._pins = not self._pins, False
            if not said:
                logger.warning(
                    f"memory for samples cannot be pinned ({error}); a GPU decodes them more slowly"
                )
        else:
            self._pinned.add(address)

    def free(self, slot: int) -> None:
        """Allows a slot to be used again. Without the lock: the collector may call this while a thread holds it."""
        self._returned.append(slot)

    def view(self, slot: int) -> memoryview:
        """Returns the memory of a slot, which is free when no part of this is left."""
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
    """A running reader process, with which one thread at a time talks."""

    def __init__(self, settings: str, memory: int) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(_ANSWER_WAIT_S), int(_ANSWER_WAIT_S % 1 * 1e6))  # a timeval
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, way, limit)
        given = open_unnamed("headway-settings")
        try:
            with open(given, "w", closefd=False) as file:
                file.write(settings)
            os.lseek(given, 0, os.SEEK_SET)
            passed = theirs.fileno(), given, memory
            # it finds packages where this process does, also those that a script has added
            program = _PROGRAM.format(path=[each for each in sys.path if isinstance(each, str)])
            with block_signals():  # which are meant for the rank, and stay blocked there
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", program, *map(str, passed)],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
        finally:
            theirs.close()
            os.close(given)
        self._connection, self._ready = Connection(ours.detach()), False
        weakref.finalize(self, _end, self._process, self._connection, os.getpid())

    def is_ready(self) -> bool:
        """Whether it has started. Raises EOFError or OSError if it has ended."""
        if not self._ready and self._connection.poll():
            self._connection.recv()
            self._ready = True
        return self._ready

    def read(self, slot: int, locations: Sequence[tuple[int, int, int, int]]) -> SlotAnswer:
        """Has samples read. Raises EOFError or OSError if it has ended, or does not answer."""
        try:
            if not self._ready:
                self._connection.recv()
                self._ready = True
            self._connection.send((slot, locations))
            return SlotAnswer(*self._connection.recv())
        except BlockingIOError as error:
            self._process.kill()  # also if it is stopped
            waited = f"process {self._process.pid} did not answer in {_ANSWER_WAIT_S:g} s"
            raise TimeoutError(waited) from error


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # in a fork of the process that it reads for
        connection.close()
        return
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)  # on which it exits, also where a fork has the connection, too
    connection.close()
    try:
        process.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:  # it waits for storage
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_WAIT_S)


@final
class ReaderPool:
    """Has processes read samples: as many as threads ask at once, and at most `max_processes`.

    With `waits`, the first request waits until its process has started; without, it is not read meanwhile.
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
        self._idle, self._lock = list[_ReaderProcess](), threading.Lock()
        self._turns = threading.BoundedSemaphore(max_processes)
        self._failed = not sys.executable or getattr(sys, "frozen", False)  # nothing can be started
        self._slots: SharedSlots | None = None
        self._told_of_slots = False

    @property
    def usable(self) -> bool:
        """Whether processes can read for this one; not for a fork of it, whose answers would be taken by both."""
        return not self._failed and os.getpid() == self._owner

    def read(self, locations: Sequence[tuple[int, int, int, int]]) -> ReadAnswer | None:
        """Has the first of some samples read; None if no process can, or no slot is free."""
        if not self.usable:
            return None
        with self._turns:
            try:
                process, slots = self._take()
                slot = slots.take() if self._waits or process.is_ready() else None
                if slot is None:
                    self._idle.append(process)
                    self._tell_of_slots(slots)
                    return None
                told = process.read(slot, locations)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._give_up(error)  # and no slot is used again: the process may still write to its own
                return None
            self._idle.append(process)
        return ReadAnswer(slots.view(slot), told)

    def _take(self) -> tuple[_ReaderProcess, SharedSlots]:
        with self._lock:
            if self._slots is None:
                self._slots = SharedSlots(self._pinning)
            if self._idle:
                return self._idle.pop(), self._slots
        return _ReaderProcess(self._settings.to_json(), self._slots.descriptor), self._slots

    def _tell_of_slots(self, slots: SharedSlots) -> None:
        with self._lock:
            said, self._told_of_slots = self._told_of_slots, self._told_of_slots or slots.all_in_use
        if slots.all_in_use and not said:
            logger.warning(
                f"images of {_SLOTS} requests are still in use, so that threads read, more slowly: keep copies of "
                "images, such as sample['jpg'].copy(), and not those of the sample"
            )

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            said, self._failed = self._failed, True
        if not said:
            reason = str(error) or "it ended"
            logger.warning(
                f"a process that reads samples failed ({reason}); they are read by threads, more slowly"
            )
