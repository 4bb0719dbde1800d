"""A process beside a rank that writes its files: `python -m headway.checkpoint.write.writer_process`, without torch.

    rank -> helper     one JSON object per line: what to do (see `writing`); the bytes of tensors are in shared memory
    helper -> rank     {"value": ...} or {"error": the name of a class of headway.errors, "message": ...}

It dies with its rank, however that ends, and is deaf to the signals that mean the run. A fork of a process that uses
CUDA or threads is never made: it is a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import headway
from headway import errors
from headway.checkpoint.format.manifest import FileFact, Manifest
from headway.checkpoint.write import disk
from headway.checkpoint.write.disk import Target
from headway.errors import HeadwayError, StorageError
from headway.run.lock import Fence
from headway.system import failpoints
from headway.system.environment import FAILPOINT

_DEAF_TO = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


# --- in the rank


@final
class Helper:
    """The rank's end. The process is started by the first command, and anew after it has died.

    `memory` is the descriptor of what they share. Use it from one thread, which must outlive the process: the kernel
    counts the death of the thread that started it as the death of the parent.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        self._given_up = False

    def do(self, command: str, target: Target, *, deadline: float, **details: object) -> Any:
        """Has something done on disk. `StorageError` if the helper dies, TimeoutError if it is not done in time."""
        if self._given_up:
            raise StorageError(f"the save of step {target.step} in {target.parent} was given up")
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        order = {
            "do": command,
            "target": dataclasses.asdict(target),
            "faults": os.environ.get(FAILPOINT, ""),
            **details,
        }
        try:
            _send(process.stdin.fileno(), json.dumps(order).encode() + b"\n", deadline)
            answer = _receive(process.stdout.fileno(), deadline)
        except BrokenPipeError:
            answer = b""
        except TimeoutError:
            self._end()
            raise
        if not answer:
            raise StorageError(
                f"the helper process that was writing step {target.step} to {target.parent} {self._end()}; "
                "earlier checkpoints are as they were. See this rank's log, and whether the memory was full"
            )
        return _value(json.loads(answer))

    def interrupt(self) -> None:
        """Ends the process, whatever it is doing, for good. For other threads; the one in `do` then raises."""
        self._given_up = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process, which has nothing to do any more."""
        self._end()
        self._reap(1.0)

    def _end(self) -> str:
        """Kills the process, and says how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "had ended before"
        assert process.stdin is not None and process.stdout is not None
        self._ended.append(process)
        process.kill()
        process.stdin.close()
        process.stdout.close()
        self._reap(1.0)
        status = process.returncode
        if status is None:  # it waits for a disk that does not answer, and ends when that does
            return "hangs in the kernel"
        return (
            f"ended with exit code {status}"
            if status >= 0
            else f"was killed by {signal.Signals(-status).name}"
        )

    def _reap(self, patience: float) -> None:
        for process in self._ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        self._ended = [process for process in self._ended if process.returncode is None]

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(headway.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # until it can ignore them
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(self._memory), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[self._memory],
                bufsize=0,
            )
        except OSError as error:
            raise StorageError(
                f"no helper process could be started to write checkpoints: {error.strerror}; "
                "check the limits on processes and memory"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a helper that is stopped must not stop us
        return process


def _send(fd: int, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _wait(fd, select.POLLOUT, deadline)
        view = view[os.write(fd, view) :]


def _receive(fd: int, deadline: float) -> bytes:
    """The next line; nothing if the other end is gone."""
    line = b""
    while not line.endswith(b"\n"):
        _wait(fd, select.POLLIN, deadline)
        piece = os.read(fd, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line


def _wait(fd: int, event: int, deadline: float) -> None:
    waiting = select.poll()
    waiting.register(fd, event)
    if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _value(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    kind = vars(errors).get(answer["error"])
    assert isinstance(kind, type) and issubclass(kind, HeadwayError), answer
    raise kind(answer["message"])


# --- in the helper


def main(memory: int, rank: int) -> None:
    """Serves a rank until it hangs up."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it died before the kernel knew that we follow
        return
    orders, server = sys.stdin.buffer, _Server(memory)
    while line := orders.readline():
        answer = server.answer(json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


@final
class _Server:
    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._view = memoryview(b"")
        self._faults: str = os.environ.get(FAILPOINT, "")

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        self._arm(order["faults"])
        target = order["target"]
        fence = target.pop("fence")
        try:
            value = self._obey(order, Target(**target, fence=fence and Fence(**fence)))
        except HeadwayError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"value": value}

    def _obey(self, order: dict[str, Any], target: Target) -> Any:
        match order["do"]:
            case "begin":
                return disk.begin(target)
            case "write":
                parts = {name: [memoryview(text.encode())] for name, text in order["texts"].items()}
                if order["size"]:
                    parts = {order["file"]: [self._shared(order["size"])], **parts}
                facts = disk.write(target, parts)
                return {name: dataclasses.asdict(fact) for name, fact in facts.items()}
            case "commit":
                documents = {name: text.encode() for name, text in order["documents"].items()}
                manifest = order["manifest"]
                facts = {name: FileFact(**fact) for name, fact in manifest.pop("files").items()}
                return disk.commit(target, documents, Manifest(**manifest, files=facts))
            case _:
                return disk.discard(target)

    def _shared(self, size: int) -> memoryview:
        if len(self._view) < size:  # it has grown, or is seen for the first time
            self._view = memoryview(
                mmap.mmap(self._memory, os.fstat(self._memory).st_size, prot=mmap.PROT_READ)
            )
        return self._view[:size]

    def _arm(self, faults: str) -> None:
        """Failpoints follow the rank's variable, which a test may change after we were started."""
        if faults != self._faults:
            self._faults = os.environ[FAILPOINT] = faults
            failpoints.reset_calls()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
