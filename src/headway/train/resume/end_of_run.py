"""The end of a run: how a signal stops it after its last step.

A signal during the last save stops the run like any other: the resumed run has only its end left. A signal while the
end is recorded stops the script of a finished run. When that script is started again, the run is restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.errors import Stopped
from headway.run import Run
from headway.system import environment


def stop_if_requested(requests: Sequence[str], where: str) -> None:
    """Stops all ranks if a request has reached any of them: there is no later point on which they could agree.

    `requests` are those of this rank. A rank may be busy in `post_run` for any length of time; the others wait for it.
    """
    exchange = RankExchange("end the run", timeout_s=FOREVER.total_seconds())
    why = next((of_rank[0] for of_rank in exchange.all_gather(lambda: list(requests)) if of_rank), None)
    if why is not None:
        raise Stopped(f"stopped by {why} {where}")


def wait_for_others() -> None:
    """Keeps rank 0 in the run until all ranks have finished `post_run`, which may take any amount of time."""
    RankExchange("end the run", channel="post_run", timeout_s=FOREVER.total_seconds()).arrive()


def resume_advice(run: Run) -> str:
    """Returns how to resume a stopped run: to submit or launch it again would make a new run."""
    if environment.directory(environment.RUN) is None:
        return "the same command resumes"
    return f"it resumes when the job starts again, or by: headway resume {run.shell_name}"
