"""Following a submitted job: its output as it comes, until it is over."""

from __future__ import annotations

import time
from typing import TextIO

from headway.errors import DONE, Stopped
from headway.launcher.job import Job
from headway.run import Run

_PAUSE = 1.0


def follow(run: Run, out: TextIO) -> int:
    """Copies the job's output to `out` until the job is over; returns 0 if it ended well.

    Ctrl-C ends the watching, not the job.
    """
    job, shown = Job(run), 0
    while True:
        now = job.status()
        shown += _copy_from(run, shown, out)
        if now.over:
            out.write(f"headway: {run.id} is {now.state}{f': {now.why}' if now.why else ''}\n")
            return {"done": DONE, "stopped": Stopped.exit_code}.get(now.state, 1)
        time.sleep(_PAUSE)


def _copy_from(run: Run, begin: int, out: TextIO) -> int:
    """Writes what has come since; returns how many bytes."""
    try:
        with run.job_log.open("rb") as file:
            file.seek(begin)
            new = file.read()
    except FileNotFoundError:  # it has not started yet
        return 0
    out.write(new.decode(errors="backslashreplace"))
    out.flush()
    return len(new)
