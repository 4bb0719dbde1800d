"""Checks of a run by the records of its earlier attempts: that it makes progress, and that no checkpoint is lost."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import INTERRUPTED, NoProgress, NoValidCheckpoint, UsageError
from headway.run import Run
from headway.system import files, jsonlines

MAX_ATTEMPTS = 3
"""attempts in a row without a new step before the run is given up"""


def check_progress(run: Run, attempt: int, step: int) -> None:
    """Raises `NoProgress` if the last attempts before `attempt` all started at the step where this one starts.

    Attempts that a user interrupted, that ended with a `UsageError` or that were refused here do not count. Any other
    attempt that ended before it started to train has made no progress.
    """
    stalled: list[dict[str, Any]] = []
    for before in reversed(run.info()["attempts"][: attempt - 1]):
        if before["exit_code"] in (INTERRUPTED, UsageError.exit_code, NoProgress.exit_code):
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


def check_not_lost(run: Run, attempt: int) -> None:
    """Raises `NoValidCheckpoint` if a run without a checkpoint must have had one: to start over would discard work.

    An attempt saves before its first step. So if one has run a step, a checkpoint has been removed.
    """
    before = [each for each in run.info()["attempts"][: attempt - 1] if "step_started" in each]
    rows = jsonlines.read_reversed(run.metrics_file(0)) if before else ()
    steps = [each.get(key) for each in before for key in ("step_started", "step_ended")]
    steps += [row.get("step") for row in rows]
    trained = max((step for step in steps if isinstance(step, int)), default=0)
    if trained:
        raise NoValidCheckpoint(
            f"{run.id} was trained up to step {trained:,}, but its checkpoints have been removed from "
            f'{run.checkpoints_dir}: restore them, or start a new run with resume="never"'
        )


def seconds_since(checkpoint: Path) -> float:
    """Returns the age of a checkpoint of an earlier attempt; 0 if it is not known."""
    with suppress(OSError):  # only shown to people
        return max(0.0, time.time() - checkpoint.stat().st_mtime)
    return 0.0


def _cause(run: Run, attempt: dict[str, Any]) -> str:
    """Returns the error of an attempt, or its exit code if the failure was not recorded."""
    try:
        error = jsonlines.parse_json(files.read_regular(run.old_failure_file(attempt["number"])))["error"]
    except (OSError, ValueError, KeyError, TypeError):
        error = f"{attempt['status']}, exit code {attempt['exit_code']}"
        if attempt["exit_code"] is None:
            error = "was killed before it could record its end"
    return f"attempt {attempt['number']}: {error:.200}"
