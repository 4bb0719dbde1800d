"""`ReaderPool`: processes that read samples for this one, and the memory that they read them into.

If one of them ends or cannot be started, this process reads by itself.
"""

from __future__ import annotations

import heapq
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from headway.data.sources.reader_process import SLOT_BYTES, EncodedRow, ReaderSettings
from headway.dist.control.signals import block_signals
from headway.system.log import logger

_SLOTS = 256  # take memory when they are first used, and those with low numbers are used first
_ANSWER_WAIT_S, _EXIT_WAIT_S = 60.0, 5.0  # it starts in about half a second
_MODULE = "headway.data.sources.reader_process"


class Pinning(Protocol):
    """Makes memory of the process ready for a GPU."""

    def pin(self, address: int, count: int, /) -> None: ...
    def unpin(self, address: int, /) -> None: ...


class ReadAnswer(NamedTuple):
    """What a reader process has read."""

    memory: memoryview
    """the slot; it is used again when no view of it is left"""
    rows: list[EncodedRow | None]
    """for the first of the wanted samples; None for each that this process has to read by itself"""


@final
class SharedSlots:
    """Memory that is shared with reader processes, in slots of equal size. Thread-safe.

    A slot is pinned when it is first used.
    """

    def __init__(self, pinning: Pinning) -> None:
        self.descriptor = os.memfd_create("headway samples")
        os.ftruncate(self.descriptor, _SLOTS * SLOT_BYTES)
        self._memory = np.frombuffer(mmap.mmap(self.descriptor, _SLOTS * SLOT_BYTES), np.uint8)
        self._pinning, self._pinned, self._free = pinning, set[int](), list(range(_SLOTS))
        self._lock, self._returned, self._pins = threading.Lock(), deque[int](), True
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

    def _pin(self, address: int) -> None:
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
        return memory.data.toreadonly()


def _release(descriptor: int, memory: Any, pinned: set[int], pinning: Pinning) -> None:
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
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        given = os.memfd_create("headway settings")
        try:
            with open(given, "w", closefd=False) as file:
                file.write(settings)
            os.lseek(given, 0, os.SEEK_SET)
            passed = theirs.fileno(), given, memory
            with block_signals():  # which are meant for the rank, and stay blocked there
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, *map(str, passed)],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                )
        finally:
            theirs.close()
            os.close(given)
        self._connection, self._ready = Connection(ours.detach()), False
        weakref.finalize(self, _end, self._process, self._connection)

    def read(self, slot: int, locations: Sequence[tuple[int, int, int, int]]) -> list[EncodedRow | None]:
        """Has samples read. Raises EOFError or OSError if it has ended, or does not answer."""
        try:
            if not self._ready:
                self._connection.recv()
                self._ready = True
            self._connection.send((slot, locations))
            rows: list[EncodedRow | None] = self._connection.recv()
        except BlockingIOError as error:
            self._process.kill()  # also if it is stopped
            waited = f"process {self._process.pid} did not answer in {_ANSWER_WAIT_S:g} s"
            raise TimeoutError(waited) from error
        return rows


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()  # on which it exits
    try:
        process.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:  # it waits for storage
        process.kill()


@final
class ReaderPool:
    """Has processes read samples: as many as threads ask at once."""

    def __init__(self, settings: ReaderSettings, pinning: Pinning) -> None:
        self._settings, self._pinning = settings, pinning
        self._idle, self._lock, self._usable = list[_ReaderProcess](), threading.Lock(), True
        self._slots: SharedSlots | None = None

    def read(self, locations: Sequence[tuple[int, int, int, int]]) -> ReadAnswer | None:
        """Has the first of some samples read; None if no process can, or no slot is free."""
        process = slot = None
        try:
            process = self._take()
            if process is None or (slot := self._shared().take()) is None:
                return None
            rows = process.read(slot, locations)
        except (EOFError, OSError) as error:
            self._give_up(error)  # and no slot is used again: the process may still write to its own
            process = None
            return None
        finally:
            if process is not None:
                self._idle.append(process)
        return ReadAnswer(self._shared().view(slot), rows)

    def _take(self) -> _ReaderProcess | None:
        with self._lock:
            if not self._usable:
                return None
            if self._idle:
                return self._idle.pop()
            shared = self._shared()
        return _ReaderProcess(self._settings.to_json(), shared.descriptor)

    def _shared(self) -> SharedSlots:
        if self._slots is None:
            self._slots = SharedSlots(self._pinning)
        return self._slots

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            said, self._usable = not self._usable, False
        if not said:
            reason = str(error) or "it ended"
            logger.warning(
                f"a process that reads samples failed ({reason}); they are read by threads, more slowly"
            )
