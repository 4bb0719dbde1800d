"""Starts the process of a rank as a fork of a process that has imported torch, in milliseconds.

Only on Linux can a process adopt the forks of another; elsewhere each rank is a new interpreter, which takes seconds to
import torch.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

from headway.errors import RankFailure
from headway.system import environment

_READ_AT_IMPORT = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH", "TORCH"
)  # fmt: skip
"""prefixes of the variables that the interpreter and torch read when they start, and not again in a fork"""
_PRELOADED = ("numpy", "torch", "torch._dynamo", "headway.train.pipeline", "headway.checkpoint.write.saver")
"""imports of a rank that trains; the first optimizer imports torch._dynamo"""
_PR_SET_CHILD_SUBREAPER = 36
_IMPORT_TIMEOUT_S = 120.0


class StartedRank(Protocol):
    """The part of `subprocess.Popen` that a rank needs."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int: ...


class StartRank(Protocol):
    """Starts the process of a rank with these four files open, as a child of this process, in its own session."""

    def __call__(self, *, stdout: int, stderr: int, connection: int, stack: int) -> StartedRank: ...


@final
class ForkedProcess:
    """A child of this process that another process forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process and returns its exit status, minus the signal that killed it."""
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode


@final
class ForkServer:
    """Starts ranks as forks of a process that has imported the modules of `_PRELOADED`."""

    def __init__(self, cwd: Path) -> None:
        self._read_at_import = _select(clean_environ())
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_IMPORT_TIMEOUT_S)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  open for as long as the process may write
        with far_end:
            files = (far_end.fileno(),)
            self._process = _start_python(
                "fork_server", files, self._output.fileno(), self._output.fileno(), cwd
            )

    def fits(self) -> bool:
        """Returns whether the variables that were read at import still have their values."""
        return self._process.poll() is None and self._read_at_import == _select(clean_environ())

    def fork(self, *, stdout: int, stderr: int, connection: int, stack: int) -> StartedRank:
        adopt_orphans(True)
        try:
            socket.send_fds(self._control, [b"fork"], [stdout, stderr, connection, stack])
            pid = int(self._control.recv(32) or 0)
        except OSError:  # it has ended, or its imports take too long
            pid = 0
        finally:
            adopt_orphans(False)
        if not pid:
            self._process.kill()
            self._process.wait()
            self._output.seek(0)
            printed = self._output.read().decode(errors="replace")
            raise RankFailure(f"the process that forks the ranks does not answer; it printed:\n{printed}")
        return ForkedProcess(pid)

    def close(self) -> None:
        """Ends the server; ranks that it forked keep running."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


def start_interpreter(cwd: Path, *, stdout: int, stderr: int, connection: int, stack: int) -> StartedRank:
    """Starts a rank as a new interpreter."""
    return _start_python("worker", (connection, stack), stdout, stderr, cwd)


def _start_python(
    module: str, files: Sequence[int], stdout: int, stderr: int, cwd: Path
) -> subprocess.Popen[bytes]:
    """Starts a process that calls `main` of a module of this package with `files`, the numbers of open files."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from headway.testing.{module} import main; main(*{tuple(files)})"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=files,
        env=clean_environ(),
        cwd=cwd,
        start_new_session=True,  # Ctrl-C is pytest's to handle; and a rank's children can be ended with it
    )


def main(fd: int) -> None:
    """Imports the modules that ranks need, then forks for each message; each fork becomes a rank."""
    preload(_PRELOADED)  # before the connection is ours to close: what fails here is printed first
    from headway.testing import worker

    with socket.socket(fileno=fd) as control:
        forked = serve(control, message_bytes=16)
    if forked:
        os.setsid()
        stdout, stderr, connection, stack = forked[1]
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        worker.main(connection, stack)


def preload(modules: Sequence[str]) -> None:
    """Imports what the forks of this process need."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else the first collection in each fork would copy all pages


def serve(control: socket.socket, message_bytes: int) -> tuple[bytes, Sequence[int]] | None:
    """Forks for each message, and replies with the pid. The process that sent the message adopts the fork.

    Returns the message and its files in each fork, and None in the server when the connection is closed.
    """
    while True:
        message, files, _, _ = socket.recv_fds(control, message_bytes, 4)
        if not message:
            return None
        read_end, write_end = os.pipe()
        if not (middle := os.fork()):
            parent = os.getpid()
            if os.fork():
                os._exit(0)  # orphans the other fork
            while os.getppid() == parent:  # until it is adopted
                time.sleep(0.001)
            os.write(write_end, str(os.getpid()).encode())
            os.close(read_end)
            os.close(write_end)
            sys.modules["numpy"].random.seed()  # else all forks would draw the same numbers
            return message, files
        os.waitpid(middle, 0)
        control.send(os.read(read_end, 32))
        for copied in (*files, read_end, write_end):
            os.close(copied)


def adopt_orphans(adopt: bool) -> None:
    """Makes this process the parent of orphaned descendants, so that it can wait for them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _select(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_IMPORT)}


def clean_environ() -> dict[str, str]:
    """Returns the environment without variables that are meant for pytest itself or for a single test."""
    for_pytest = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", environment.FAILPOINT)
    kept = {name: value for name, value in os.environ.items() if name not in for_pytest}
    return {"OMP_NUM_THREADS": "1"} | kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
