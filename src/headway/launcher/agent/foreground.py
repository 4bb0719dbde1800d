"""The terminal of a single rank: it reads what is typed, and Ctrl-C and Ctrl-Z do what they do without headway.

The rank has a process group of its own, so the agent hands it the terminal, as a shell does: only the group in the
foreground may read. Where it is stopped from there, the agent stops as well, so that the shell shows its prompt.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import final

_STDIN = 0
_BY_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@final
class Foreground:
    """Whether standard input is the terminal of this process, and who reads from it.

    >>> foreground = Foreground()
    >>> start_rank(command, foreground=foreground)  # calls `enter` in the child
    >>> foreground.follow(rank_pid)  # often
    >>> foreground.leave()
    """

    def __init__(self) -> None:
        self._is_ours = _owner() == os.getpgrp()

    def enter(self) -> None:
        """Gives the terminal to the process group of this process, if the agent had it."""
        if self._is_ours:
            _give(os.getpgrp())

    def follow(self, pid: int) -> None:
        """Stops this process if the terminal has stopped the rank; when it goes on, so does the rank."""
        try:
            stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:  # it has ended
            return
        if stopped is None or stopped.si_status not in _BY_TERMINAL:
            return
        if self._is_ours:
            _give(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        self._is_ours = _owner() == os.getpgrp()
        if self._is_ours:
            _give(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)

    def leave(self) -> None:
        """Takes the terminal back."""
        if self._is_ours:
            _give(os.getpgrp())


def _owner() -> int | None:
    """Returns the process group in the foreground of the terminal; None if standard input is none, or another's."""
    try:
        return os.tcgetpgrp(_STDIN)
    except OSError:
        return None


def _give(group: int) -> None:
    # a process in the background that changes the terminal is stopped otherwise
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):  # the terminal was closed
            os.tcsetpgrp(_STDIN, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
