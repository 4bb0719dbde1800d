"""Whether a run gets anywhere: three attempts without a new step are enough."""

from __future__ import annotations

import json
from typing import Any

from headway.errors import INTERRUPTED, NoProgress, UsageError
from headway.run import Run

LIMIT = 3


def check_progress(run: Run, attempt: int, step: int) -> None:
    """Raises `NoProgress` if the last attempts before `attempt` all began where this one begins, at `step`.

    Those that a user interrupted do not count, nor does a script that was refused; any other attempt that did not even
    begin has made no progress.
    """
    barren: list[dict[str, Any]] = []
    for before in reversed(run.info()["attempts"][: attempt - 1]):
        if before["exit_code"] in (INTERRUPTED, UsageError.exit_code):
            continue
        if before.get("step_started", step) != step:
            break
        barren.append(before)
    if len(barren) >= LIMIT:
        causes = "; ".join(_cause(run, each) for each in reversed(barren[:LIMIT]))
        raise NoProgress(
            f"{len(barren)} attempts in a row got no further than step {step:,} ({causes}). Find the cause before you "
            f'start {run.id} again, then go on with resume="must", or start a new run with resume="never"'
        )


def _cause(run: Run, attempt: dict[str, Any]) -> str:
    try:
        error = json.loads(run.old_failure_file(attempt["number"]).read_bytes())["error"]
    except (OSError, ValueError, KeyError):
        error = f"{attempt['status']}, exit code {attempt['exit_code']}"
    return f"attempt {attempt['number']}: {error:.200}"
