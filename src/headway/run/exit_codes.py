"""What an exit code says about a run that ended with it: for records, lists of runs, and the last line of a launch.

`headway.errors` gives each error its code. A code that is not in the table, 1 among them, is a failure whose report
says more than any code.
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
    """The state that an exit code stands for, in words for lists of runs and for whoever has just seen the run end."""

    state: EndState
    why: str
    """in a list of runs, where nobody has recorded more"""
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
        why="stopped with a checkpoint, and did not record by what",
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
"""the exit codes that need no report of a failure"""


def state_of(code: int) -> EndState:
    """Returns how a run has ended that left with an exit code.

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
    known: dict[str, int] = {"done": DONE, "stopped": Stopped.exit_code, "interrupted": INTERRUPTED}
    return known.get(state, HeadwayError.exit_code)
