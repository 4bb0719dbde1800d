"""The process that writes a rank's files: `python -m headway.checkpoint.write.writer_process`, without torch.

    rank -> writer     one JSON object per line: a command of `disk`; the bytes of tensors are in shared memory
    writer -> rank     {"value": ...} or {"error": the name of a class of headway.errors, "message": ...}

It ends with its rank, even if that is killed, and ignores the signals that are meant for the run. It is a fresh
interpreter, since a process that uses CUDA or threads must not be forked.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, final

import psutil

from headway import errors
from headway.checkpoint.format.manifest import FileChecksum, Manifest
from headway.checkpoint.write import disk
from headway.checkpoint.write.disk import SaveTarget
from headway.errors import HeadwayError, StorageError
from headway.interpreter import module_command, module_environment
from headway.run.lock import Fence
from headway.system import environment, failpoints
from headway.system.locks import block_forks
from headway.system.log import logger
from headway.system.retries import stop_requested

_IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_REAP_S = 1.0
_CHECK_S = 1.0
"""time between two checks of the writer process by a rank that waits for it"""
_STOPPED_CHECKS = 10
"""after how many checks in a row a stopped writer process is killed"""
_STOPPING_CHECKS = 15
"""after how many checks a rank that was requested to stop logs which writer process it waits for"""


# --- in the rank


@final
class WriterProcess:
    """The writer process, seen from its rank. A command starts the process if it is not running.

    `memory` is the descriptor of the shared memory. Use this object from one thread, which must outlive the process:
    when the thread that started it ends, the kernel kills the process as if the rank had ended.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        self._interrupted = False

    def call(self, command: str, target: SaveTarget, *, deadline: float, **details: object) -> Any:
        """Runs a command of `disk`. `StorageError` if the process ends, TimeoutError if it takes too long."""
        if self._interrupted:
            raise StorageError(f"the save of step {target.step} in {target.parent} was canceled")
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        message = {
            "command": command,
            "target": dataclasses.asdict(target),
            "faults": os.environ.get(environment.FAILPOINT, ""),
            **details,
        }
        try:
            writer_wait = _WriterWait(process.pid, deadline, f"step {target.step} to {target.parent}")
            _send(process.stdin.fileno(), json.dumps(message).encode() + b"\n", writer_wait)
            answer = _receive(process.stdout.fileno(), writer_wait)
        except BrokenPipeError:
            answer = b""
        except (StorageError, TimeoutError):  # it is stopped, or takes too long
            self._end()
            raise
        if not answer:
            raise StorageError(
                f"the process that was writing step {target.step} to {target.parent} {self._end()}; earlier "
                f"checkpoints are unchanged. Check the log of rank {os.environ.get('RANK', '0')}, and whether "
                f"{socket.gethostname()} ran out of memory"
            )
        return _value(json.loads(answer))

    def interrupt(self) -> None:
        """Kills the process for good. For other threads; the one in `call` then raises."""
        self._interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the idle process."""
        self._end()
        self._reap(_REAP_S)

    def _end(self) -> str:
        """Kills the process; returns how it ended, for a message."""
        process, self._process = self._process, None
        if process is None:
            return "had ended before"
        assert process.stdin is not None and process.stdout is not None
        self._ended.append(process)
        process.kill()
        process.stdin.close()
        process.stdout.close()
        self._reap(_REAP_S)
        status = process.returncode
        if status is None:  # it waits for a disk that does not respond, and ends when that does
            return "hangs in the kernel"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"

    def _reap(self, timeout_s: float) -> None:
        for process in self._ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        self._ended = [process for process in self._ended if process.returncode is None]

    def _start(self) -> subprocess.Popen[bytes]:
        # the process inherits the blocked signals, until it ignores them itself
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
        try:
            with block_forks():  # the training thread may start data workers at the same time
                process = subprocess.Popen(
                    module_command(__name__, str(self._memory), str(os.getpid())),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=module_environment(),
                    pass_fds=[self._memory],
                    bufsize=0,
                )
        except OSError as error:
            raise StorageError(
                f"the process that writes checkpoints could not be started: {error.strerror}; check the limits on "
                "processes and memory"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a stopped process must not block the rank
        return process


def _send(fd: int, data: bytes, writer_wait: _WriterWait) -> None:
    view = memoryview(data)
    while view:
        writer_wait.wait(fd, select.POLLOUT)
        view = view[os.write(fd, view) :]


def _receive(fd: int, writer_wait: _WriterWait) -> bytes:
    """Reads the next line; empty if the process has ended."""
    line = b""
    while not line.endswith(b"\n"):
        writer_wait.wait(fd, select.POLLIN)
        piece = os.read(fd, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line


@final
class _WriterWait:
    """How long a rank waits for its writer process: until a deadline, and not for one that is stopped.

    While the run is requested to stop, the user waits for this save, so a warning names the process. `writing`
    completes "the process that writes ...".
    """

    def __init__(self, pid: int, deadline: float, writing: str) -> None:
        self._pid, self._deadline, self._writing = pid, deadline, writing
        self._stopped_checks = self._stopping_checks = 0

    def wait(self, fd: int, event: int) -> None:
        waiting = select.poll()
        waiting.register(fd, event)
        while not waiting.poll(max(0.0, min(_CHECK_S, self._deadline - time.monotonic())) * 1000):
            if time.monotonic() >= self._deadline:
                raise TimeoutError
            self._check()

    def _check(self) -> None:
        """Counts checks, not seconds: time in which the whole job was suspended does not count."""
        try:
            state = psutil.Process(self._pid).status()
        except psutil.Error:  # it has just ended
            return
        self._stopped_checks = self._stopped_checks + 1 if state == psutil.STATUS_STOPPED else 0
        if self._stopped_checks >= _STOPPED_CHECKS:
            raise StorageError(
                f"the process that writes {self._writing} (pid {self._pid}) was stopped (SIGSTOP) for "
                f"{_STOPPED_CHECKS * _CHECK_S:g} s and was killed; earlier checkpoints are unchanged"
            )
        self._stopping_checks += stop_requested.is_set()
        if self._stopping_checks == _STOPPING_CHECKS:
            logger.warning(
                "the run stops when process %d has written %s; it has waited %g s so far (%s)",
                self._pid,
                self._writing,
                _STOPPING_CHECKS * _CHECK_S,
                "the process waits for the disk" if state == psutil.STATUS_DISK_SLEEP else state,
            )


def _value(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    kind = vars(errors).get(answer["error"])
    assert isinstance(kind, type) and issubclass(kind, HeadwayError), answer
    raise kind(answer["message"])


# --- in the writer process


def main(memory: int, rank: int) -> None:
    """Runs the commands of a rank until it closes the pipe."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # the rank ended before the call above
        return
    commands, server = sys.stdin.buffer, _WriterServer(memory)
    while line := commands.readline():
        answer = server.handle(json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


@final
class _WriterServer:
    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._view = memoryview(b"")
        self._faults: str = os.environ.get(environment.FAILPOINT, "")

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        self._set_faults(message["faults"])
        target = message["target"]
        fence = target.pop("fence")
        try:
            value = self._run(message, SaveTarget(**target, fence=fence and Fence(**fence)))
        except HeadwayError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"value": value}

    def _run(self, message: dict[str, Any], target: SaveTarget) -> Any:
        match message["command"]:
            case "begin":
                return disk.begin(target)
            case "write":
                parts = {name: [memoryview(text.encode())] for name, text in message["documents"].items()}
                if message["size"]:
                    parts = {message["file"]: [self._shared(message["size"])], **parts}
                facts = disk.write(target, parts)
                return {name: dataclasses.asdict(fact) for name, fact in facts.items()}
            case "commit":
                documents = {name: text.encode() for name, text in message["documents"].items()}
                manifest = message["manifest"]
                facts = {name: FileChecksum(**fact) for name, fact in manifest.pop("files").items()}
                return disk.commit(target, documents, Manifest(**manifest, files=facts))
            case _:
                return disk.discard(target)

    def _shared(self, size: int) -> memoryview:
        if len(self._view) < size:  # the memory has grown, or is not mapped yet
            self._view = memoryview(
                mmap.mmap(self._memory, os.fstat(self._memory).st_size, prot=mmap.PROT_READ)
            )
        return self._view[:size]

    def _set_faults(self, faults: str) -> None:
        """Copies the rank's failpoints, which a test may change after this process started."""
        if faults != self._faults:
            self._faults = os.environ[environment.FAILPOINT] = faults
            failpoints.reset_calls()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
