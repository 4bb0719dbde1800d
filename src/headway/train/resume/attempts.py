"""Detection of runs that make no progress: three attempts without a new step."""

from __future__ import annotations

import json
from typing import Any

from headway.errors import INTERRUPTED, NoProgress, UsageError
from headway.run import Run

MAX_ATTEMPTS = 3
"""attempts in a row without a new step before the run is given up"""


def check_progress(run: Run, attempt: int, step: int) -> None:
    """Raises `NoProgress` if the last attempts before `attempt` all started at the step where this one starts.

    Attempts that a user interrupted or that ended with a `UsageError` do not count. Any other attempt that ended before
    it started to train has made no progress.
    """
    stalled: list[dict[str, Any]] = []
    for before in reversed(run.info()["attempts"][: attempt - 1]):
        if before["exit_code"] in (INTERRUPTED, UsageError.exit_code):
            continue
        if before.get("step_started", step) != step:
            break
        stalled.append(before)
    if len(stalled) >= MAX_ATTEMPTS:
        causes = "; ".join(_cause(run, each) for each in reversed(stalled[:MAX_ATTEMPTS]))
        raise NoProgress(
            f"{len(stalled)} attempts in a row made no progress beyond step {step:,} ({causes}): fix the cause, then "
            f'resume {run.id} with resume="must" or start a new run with resume="never"'
        )


def _cause(run: Run, attempt: dict[str, Any]) -> str:
    """Returns the error of an attempt, or its exit code if the failure was not recorded."""
    try:
        error = json.loads(run.old_failure_file(attempt["number"]).read_bytes())["error"]
    except (OSError, ValueError, KeyError):
        error = f"{attempt['status']}, exit code {attempt['exit_code']}"
    return f"attempt {attempt['number']}: {error:.200}"
