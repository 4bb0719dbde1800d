"""The end of a run: what a signal does after its last step, and what a script finds that was killed after it.

A signal in the last save stops the run like any other: it is resumed, and only its end is left. One that comes while
the end is recorded stops the script of a run that is done. Started again, that script gets the run restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.errors import Stopped
from headway.run import Run
from headway.system import environment


def stop_if_requested(heard: Sequence[str], where: str) -> None:
    """Stops all ranks if one was asked to: there is no later point on which they could agree.

    `heard` is what this rank was asked by. A rank may be busy in `post_run` for any time, and the others wait for it.
    """
    all_heard = RankExchange("end the run", timeout_s=FOREVER.total_seconds()).all_gather(lambda: list(heard))
    why = next((each[0] for each in all_heard if each), None)
    if why is not None:
        raise Stopped(f"stopped by {why} {where}")


def wait_for_others() -> None:
    """Keeps rank 0 in a run until all ranks are through with `post_run`, in which one may be busy for any time."""
    RankExchange("end the run", channel="post_run", timeout_s=FOREVER.total_seconds()).arrive()


def resume_advice(run: Run) -> str:
    """Returns how a stopped run is resumed: what was submitted or launched makes a new run when it is called again."""
    if environment.directory(environment.RUN) is None:
        return "the same command resumes"
    return f"it resumes when the job starts again, or by: headway resume {run.id}"
