"""The meaning of each exit code of a run: for records, lists of runs, and the last line of a launch.

`headway.errors` gives each error its code. Any code that is not in the table, such as 1, is a failure; its report
explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from headway.errors import (
    DONE,
    INTERRUPTED,
    TERMINATED,
    HeadwayError,
    NoProgress,
    NoValidCheckpoint,
    Stopped,
    StorageError,
)

EndState = Literal["done", "failed", "stopped", "interrupted"]


@final
@dataclass(frozen=True, kw_only=True)
class ExitMeaning:
    """The state of a run that ended with an exit code, and the reason in words."""

    state: EndState
    why: str
    """in a list of runs, if the run recorded no other reason"""
    sentence: str
    """after the output of the run, with what to do next"""


EXIT_CODES: Mapping[int, ExitMeaning] = {
    StorageError.exit_code: ExitMeaning(
        state="failed",
        why="its storage failed",
        sentence="the run's storage failed; the output above says how",
    ),
    Stopped.exit_code: ExitMeaning(
        state="stopped",
        why="stopped with a checkpoint; it did not record why",
        sentence="stopped with a checkpoint; the same command resumes from it",
    ),
    NoValidCheckpoint.exit_code: ExitMeaning(
        state="failed",
        why="checkpoints exist, but none of them is valid",
        sentence="checkpoints exist, but none of them is valid; the output above says more",
    ),
    NoProgress.exit_code: ExitMeaning(
        state="failed",
        why="three attempts made no new step",
        sentence="three attempts made no new step; look at the output above before you try again",
    ),
    INTERRUPTED: ExitMeaning(
        state="interrupted", why="interrupted by Ctrl-C", sentence="interrupted by Ctrl-C"
    ),
    TERMINATED: ExitMeaning(
        state="interrupted", why="ended by SIGTERM before it could save", sentence="stopped by SIGTERM"
    ),
}
"""exit codes that explain an end without a failure report"""


def state_of(code: int) -> EndState:
    """Returns the state of a run that ended with an exit code.

    >>> state_of(0), state_of(75), state_of(143), state_of(9)
    ('done', 'stopped', 'interrupted', 'failed')
    """
    if code == DONE:
        return "done"
    return EXIT_CODES[code].state if code in EXIT_CODES else "failed"


def code_of(state: str) -> int:
    """Returns an exit code for a run of which only the state is known.

    >>> code_of("done"), code_of("stopped"), code_of("interrupted"), code_of("lost")
    (0, 75, 130, 1)
    """
    codes: dict[str, int] = {"done": DONE, "stopped": Stopped.exit_code, "interrupted": INTERRUPTED}
    return codes.get(state, HeadwayError.exit_code)
