"""The end of a process in bounded time and with its exit code, whatever threads and children it still has.

Python joins threads and child processes when it exits, without a limit: one that never ends keeps the process alive,
and the scheduler waits for its exit code and keeps its nodes allocated.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, final

import psutil

EXIT_S = 10.0
"""how long a rank that has stopped or failed may take to exit; less than `stop.MARGIN_S`"""
HUNG_CODE = 1
"""the exit code of a process that does not exit, unless it has failed with its own"""
_TERMINATE_S = 2.0
"""how long a daemonic child has after SIGTERM, and again after SIGKILL"""
_REPORT_S = 2.0
"""how long the report on what is still alive may take"""
_FINALIZE_S = 60.0
"""how long the interpreter may take to finalize when a script has ended by itself: nothing can be reported then"""
_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2  # of Linux


def exit_within(seconds: float, code: int) -> None:
    """Ends this process with `code` after `seconds`, from C, so that it works even if the interpreter is stuck."""
    event = _SigEvent(value=code, signo=0, notify=_SIGEV_THREAD)
    times = _TimerSpec(0, 0, int(seconds), int(seconds % 1 * 1e9))
    timer = ctypes.c_void_p()
    try:
        libc = ctypes.CDLL(None)
        event.function = ctypes.cast(libc._exit, ctypes.c_void_p)
        made = libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0
        made = made and libc.timer_settime(timer, 0, ctypes.byref(times), None) == 0
    except AttributeError:  # not Linux
        made = False
    if not made:  # the code is lost, but the process ends
        faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123


class _SigEvent(ctypes.Structure):
    """`struct sigevent` of Linux: a timer calls `function(value)` in a new thread."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: the interval, and the first time, in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


def limit_exit(
    code: int,
    why: str,
    *,
    seconds: float = EXIT_S,
    finalize_s: float = _REPORT_S,
    others_are_late: Callable[[], bool] = lambda: False,
) -> None:
    """Limits the exit of this process, which begins now, to `seconds`; then reports what is still alive and exits.

    Call it when the exit code is known and the process is to exit. It does nothing under `python -i`. Once threads and
    hooks have ended, the interpreter has `finalize_s` more. It also has that time if `others_are_late` returns True:
    this process only waits for other ranks, and `others_are_late` has made sure that they are ended.
    """
    if sys.flags.inspect:
        return

    def end() -> None:
        if not others_are_late():
            _report_and_exit(code, why, seconds)

    watch = threading.Timer(seconds, end)
    watch.name, watch.daemon = "headway exit", True
    watch.start()
    # from C, since no thread of Python runs once the interpreter is being finalized
    exit_within(seconds + finalize_s, code)


def limit_normal_exit(why: str, seconds: float, others_are_late: Callable[[], bool] = lambda: False) -> None:
    """Limits the exit of this process to `seconds` when its script ends, by itself or by `sys.exit`.

    A thread or a hook of `atexit` that never ends is a hang like any other: the process exits with code 1, or with the
    code of `sys.exit` that `ExitCode` has noted.
    """
    rank = os.getpid()

    def begin() -> None:
        if os.getpid() == rank:  # a forked child is another process
            limit_exit(
                EXIT_CODE.given or HUNG_CODE,
                why,
                seconds=seconds,
                finalize_s=_FINALIZE_S,
                others_are_late=others_are_late,
            )

    # called when the main thread is done, before Python waits for the other threads
    threading._register_atexit(begin)  # type: ignore[attr-defined]


@final
class ExitCode:
    """The code of the `sys.exit` that ends the script, which Python does not expose to hooks at exit.

    A `sys.exit` that the script catches does not count. `raise SystemExit(3)` is not noted, nor is a `sys.exit` that
    was imported by name before `watch`. `os._exit(0)` ends the script as well, and calls no hook but `before_os_exit`.
    """

    def __init__(self) -> None:
        self.given = 0
        self._usual: Any = None
        self._usual_os_exit = os._exit
        self._before_os_exit: Callable[[], object] | None = None
        self._pid = 0

    def watch(self, before_os_exit: Callable[[], object] | None = None) -> None:
        """Replaces `sys.exit` by a function that does the same, and notes the code if nothing catches the exception."""
        if self._usual is None:
            self.given, self._usual, self._usual_os_exit = 0, sys.exit, os._exit
            sys.exit, os._exit = self._exit, self._os_exit
        # a forked child that joins a group exits on its own
        self._before_os_exit, self._pid = before_os_exit, os.getpid()

    def restore(self) -> None:
        """Restores `sys.exit` and `os._exit`; the noted code stays."""
        if self._usual is not None and sys.exit == self._exit:
            sys.exit = self._usual
        if self._usual is not None and os._exit == self._os_exit:
            os._exit = self._usual_os_exit
        self._usual = self._before_os_exit = None

    def _os_exit(self, status: int) -> NoReturn:
        before, self._before_os_exit = self._before_os_exit, None
        try:
            # a forked child is another process
            if status == 0 and before is not None and os.getpid() == self._pid:
                before()
        except BaseException as error:  # noqa: BLE001 - os._exit raises nothing, so nothing above could catch it
            status = HUNG_CODE
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            if os.getpid() == self._pid:
                _remove_temp_dir()
            self._usual_os_exit(status)

    def _exit(self, status: str | int | None = None, /) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)  # it ends only its thread, and threading checks for exactly this class
        raise _WatchedExit(status, self)


@final
class _WatchedExit(SystemExit):
    """Notes its code when the interpreter itself reads it, which happens only if no code has caught the exception."""

    def __init__(self, status: str | int | None, noted_by: ExitCode) -> None:
        super().__init__(status)
        self.args = (status,)
        self._noted_by = noted_by

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:
        return SystemExit, self.args  # another process has an exit of its own

    @property
    def code(self) -> str | int | None:  # type: ignore[override]
        status: str | int | None = self.args[0]
        if sys._getframe().f_back is None:  # no code of Python has called this
            self._noted_by.given = 0 if status is None else int(status) if isinstance(status, int) else 1
        return status


EXIT_CODE = ExitCode()
"""the exit code of this process"""


def _report_and_exit(code: int, why: str, seconds: float) -> None:
    text = (
        f"headway: {why}, but the process did not exit within {seconds:g} s; still alive: "
        f"{'; '.join(describe_survivors())}. It is ended with exit code {code}\n"
    )
    os.write(2, text.encode())
    for child in _own_daemonic_children():
        child.kill()
    os._exit(code)


def describe_survivors() -> list[str]:
    """Describes what keeps this process from exiting: its threads, its child processes, and where it waits."""
    main = threading.main_thread()
    threads = [
        f"thread {each.name!r}" for each in threading.enumerate() if not each.daemon and each is not main
    ]
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just exited
            children.append(f"process {child.pid} ({child.name()})")
    place = ["the main thread in native code"]
    if (frame := sys._current_frames().get(main.ident or 0)) is not None:
        code = frame.f_code
        place = [f"the main thread in {code.co_qualname} ({code.co_filename}:{frame.f_lineno})"]
    return [*threads, *children, *place]


def _remove_temp_dir() -> None:
    """Removes the temporary directory that multiprocessing made for data workers, which an `os._exit` would leave.

    It must belong to this process: a fork also has the directory of its parent, whose data workers could not send
    another batch without it.
    """
    directory = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if directory is None:
        return
    finalizers: list[Any] = list(multiprocessing.util._finalizer_registry.values())  # type: ignore[attr-defined]
    for finalizer in finalizers:
        if finalizer._pid == os.getpid() and directory in (finalizer._args or ()):
            with suppress(OSError):
                finalizer()  # multiprocessing makes another directory if this process lives on


def end_daemonic_children(*, timeout_s: float = _TERMINATE_S) -> None:
    """Ends the daemonic children of this process, such as data workers, when it exits.

    Python's own exit sends them SIGTERM and then waits forever, even for one that is stuck in the kernel.
    """
    if not (children := _own_daemonic_children()):
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker was killed
    for end in (BaseProcess.terminate, BaseProcess.kill):
        children = _end(children, end, timeout_s)
    for child in children:
        # multiprocessing would join it again, and wait for the file system in which it is stuck
        multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]


def _own_daemonic_children() -> list[BaseProcess]:
    """Returns the daemonic children of this process.

    A process that was forked without multiprocessing still lists the children of its parent.
    """
    return [
        child
        for child in multiprocessing.active_children()
        if child.daemon and child._parent_pid == os.getpid()  # type: ignore[attr-defined]
    ]


def _end(
    children: Sequence[BaseProcess], end: Callable[[BaseProcess], None], timeout_s: float
) -> list[BaseProcess]:
    """Ends children by calling `end`; returns those that are still alive after `timeout_s`."""
    for child in children:
        end(child)
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    return [child for child in children if child.is_alive()]
