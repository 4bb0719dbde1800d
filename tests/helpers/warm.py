"""Starts Python processes as forks of one that has imported torch: a rank costs hundredths of a second, not three.

`Popen` and `run` are those of `subprocess`; with HEADWAY_FAULTS=full they start real interpreters. The process is a
child of this one, with its own pid, signals, files, directory and variables, and a node agent among them forks its
ranks likewise. What differs: torch is imported already, with the variables that it read when the server started, and
the end of the interpreter is imitated. So what is about imports or the exit needs real processes.

>>> warm.run([sys.executable, "-m", "headway", "run", "--nproc", "2", "train.py"], capture_output=True, text=True)
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from headway.testing.fork_server import adopt_orphans, preload, serve

_PRELOADED = ("numpy", "torch._dynamo", "headway.train.pipeline", "headway.checkpoint.write.saver", "psutil")
_AGENTS = ("headway", "headway.launcher.functions.background")
"""modules whose process starts ranks, and has no threads when it does"""
_REAL = os.environ.get("HEADWAY_FAULTS") == "full"
_REQUEST_BYTES = 1 << 17
_UsualPopen = subprocess.Popen


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; what is no command of this interpreter starts as ever."""

    always_forks = False

    def _execute_child(self, *args: Any) -> None:
        usual = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(usual).bind(*args).arguments
        command = given["args"]
        if (
            (_REAL and not self.always_forks)
            or _parse(command) is None
            or given["preexec_fn"]
            or given["pass_fds"]
        ):
            usual(*args)
            return
        environ = dict(os.environ if given["env"] is None else given["env"])
        cwd = os.path.abspath(given["cwd"] or ".")  # noqa: PTH100  as given, links and all
        request = {
            "command": list(command),
            "cwd": cwd,
            "environ": environ,
            "session": given["start_new_session"],
        }
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _server().fork(request, [number if end == -1 else end for number, end in enumerate(ends)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


class ForkedPopen(Popen):
    """The same, also with HEADWAY_FAULTS=full: for a table of hundreds of starts."""

    always_forks = True


def run(command: Sequence[str], *, fork: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
    with mock.patch("subprocess.Popen", ForkedPopen if fork else Popen):
        return subprocess.run(command, **options)


def _parse(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns -m, -c or "script" and what follows; None if this is no command of this interpreter.

    >>> _parse([sys.executable, "-P", "-m", "headway", "run"])
    ('-m', ['headway', 'run'])
    """
    if command[0] == str(Path(sys.executable).with_name("headway")):
        return "-m", ["headway", *command[1:]]
    rest = list(command[1:])
    while rest and rest[0] == "-P":
        rest.pop(0)
    if command[0] != sys.executable or not rest:
        return None
    if rest[0] in ("-m", "-c"):
        return rest[0], rest[1:]
    return None if rest[0].startswith("-") else ("script", rest)


class _Server:
    """This process's end of the connection to the process that forks; that one ends with this one."""

    def __init__(self) -> None:
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(120)
        with far_end:
            self._process = _UsualPopen(
                [sys.executable, __file__, str(far_end.fileno())],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._close)

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        adopt_orphans(True)
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], files)
            return int(self._control.recv(32))
        finally:
            adopt_orphans(False)

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def _server() -> _Server:
    return _Server()


# --- in the server, and in what it forks


def _start(
    files: Sequence[int], *, command: list[str], cwd: str, environ: dict[str, str], session: bool
) -> NoReturn:
    for number, copied in enumerate(files):
        os.dup2(copied, number)
    if session:
        os.setsid()
    os.chdir(cwd)
    _become(command, environ)


class _ForkingPopen(subprocess.Popen[Any]):
    """How an agent starts ranks: all is as ever until the moment at which the child would execute the command."""

    def __init__(self, command: Any, *, env: Any = None, preexec_fn: Any = None, **options: Any) -> None:
        if _parse(command) is not None:
            preexec_fn = partial(_become, list(command), dict(env or os.environ), preexec_fn)
        super().__init__(command, env=env, preexec_fn=preexec_fn, **options)


def _become(command: list[str], environ: dict[str, str], prepare: Any = None) -> NoReturn:
    """Goes on as a new interpreter would that executes the command."""
    if prepare is not None:
        prepare()  # first, as before an exec: what it ignores is at no time a signal that kills
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    kind, arguments = _parse(command) or ("script", command[1:])
    sys.orig_argv[:] = command
    subprocess.Popen = _ForkingPopen if kind == "-m" and arguments[0] in _AGENTS else _UsualPopen  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(environ)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # what the parent removes at its end
    library = logging.getLogger("headway")
    library.handlers.clear()
    library.propagate, library.level = True, logging.NOTSET
    sys.modules["numpy"].random.seed()  # of a rank, too, which an agent forks
    try:
        _execute(kind, arguments, is_safe=command[0] != sys.executable or command[1] == "-P")
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever a program raises
        code = _report(error)
    _end(code)


def _report(error: BaseException) -> int:
    """Returns the exit code, or minus the signal that ends this process."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    try:
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:  # that of headway decides on the exit code
        return _report(end)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Leaves out the frames of this module: a traceback begins with the program's."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _execute(kind: str, arguments: list[str], *, is_safe: bool) -> None:
    sys.argv[:] = arguments
    first = str(Path(arguments[0]).resolve().parent) if kind == "script" else ""
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    found = [] if is_safe else [first]
    sys.path[:1] = [*found, *(each for each in path if each not in sys.path)]
    if kind == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "script":
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], vars(main))


def _end(code: int) -> NoReturn:
    """As an interpreter ends: it waits for threads, calls what was registered, and flushes."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        preload(_PRELOADED)
        forked = serve(connection, _REQUEST_BYTES)
    if forked:
        request, files = forked
        _start(files, **json.loads(request))
