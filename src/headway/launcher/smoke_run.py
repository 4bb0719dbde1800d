"""`headway run --smoke`: a script from its first step to one after a restart, in a folder that is thrown away."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

from headway.errors import Stopped, UsageError
from headway.launcher.agent.agent import Agent
from headway.run import Run


def run_smoke(command: Sequence[str], *, processes: int) -> int:
    """Runs the script twice, a few steps each time, the second time from the first one's checkpoint.

    The folder is kept if anything goes wrong.
    """
    folder = tempfile.mkdtemp(prefix="headway-smoke-")
    run = Run.create(folder, name="smoke", command=command)
    for part, expected in (("save", Stopped.exit_code), ("resume", 0)):
        environ = {**os.environ, "HEADWAY_RUN": str(run.path), "HEADWAY_SMOKE": part}
        code = Agent(command, processes=processes, environ=environ).run()
        if not run.info()["attempts"]:
            shutil.rmtree(folder)
            if code:
                return code
            raise UsageError(
                "the script ran no pipeline, so there is nothing to try out: call pipe.run() in it"
            )
        if code != expected:
            print(
                f"headway: the smoke run failed in the part {part!r}; it is kept in {run.path}",
                file=sys.stderr,
            )
            return code or 1
    shutil.rmtree(folder)
    print(
        "headway: smoke run passed: two steps, a validation, a save, and a step after resuming",
        file=sys.stderr,
    )
    return 0
