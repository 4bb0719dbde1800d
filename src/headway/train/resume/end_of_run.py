"""The end of a run: what a signal does after its last step, and what a script finds that was killed after it.

A signal in the last save stops the run like any other: it is resumed, and only its end is left. One that comes while
the end is recorded stops the script of a run that is done. Started again, that script gets the run restored.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial

from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.dist.group import current
from headway.errors import HeadwayError, Stopped
from headway.run import Run
from headway.system import environment
from headway.system.log import logger


def stop_if_requested(heard: Sequence[str], where: str) -> None:
    """Stops all ranks if one was asked to: there is no later point on which they could agree.

    `heard` is what this rank was asked by. A rank may be busy in `post_run` for any time, and the others wait for it.
    """
    all_heard = RankExchange("end the run", timeout_s=FOREVER.total_seconds()).all_gather(lambda: list(heard))
    why = next((each[0] for each in all_heard if each), None)
    if why is not None:
        raise Stopped(f"stopped by {why} {where}")


def note_script(run: Run, attempt: int | None = None) -> None:
    """Notes in a run that is finished, or about to be, that its script has not ended, and when it has.

    A script that is killed in between, while it tests or exports its model, is to find this run again, and not to
    train another one. `attempt` is the one that finishes it; None if an earlier one has.
    """
    if hasattr(sys, "ps1"):  # a notebook or a prompt: what follows is not known, and no command repeats it
        return
    if (
        multiprocessing.parent_process() is not None
    ):  # not the script itself, and forked, it ends without `atexit`
        return
    number = len(run.info()["attempts"]) if attempt is None else attempt
    if attempt is not None:
        run.note_attempt(number, script_ended=False)
    current().at_clean_exit.append(partial(_note_end, run, number))


def _note_end(run: Run, attempt: int) -> None:
    try:
        run.note_attempt(attempt, script_ended=True)
    except (OSError, HeadwayError) as error:  # the script has done its work
        logger.warning("%s; the same command restores %s instead of training a new run", error, run.id)


def resume_advice(run: Run) -> str:
    """Returns how a stopped run is resumed: what was submitted or launched makes a new run when it is called again."""
    if environment.directory(environment.RUN) is None:
        return "the same command resumes"
    return f"it resumes when the job starts again, or by: headway resume {run.id}"
