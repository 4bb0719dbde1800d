"""A sweep on this machine: one run after the other, each in a directory of its own, all from one copy of the code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.errors import DONE, INTERRUPTED, TERMINATED
from headway.launcher import sweep
from headway.launcher.agent.agent import Agent, check_processes
from headway.launcher.program import Program
from headway.launcher.submission import Script, prepared, program
from headway.run import Run
from headway.run.status import note_end


def run_sweep(
    script: Script,
    specs: Sequence[str],
    *,
    processes: int = 1,
    root: Path = Path("runs"),
    name: str | None = None,
) -> int:
    """Runs a script once for each setting and returns the exit code of the first that failed; Ctrl-C ends them all.

    >>> run_sweep(Script(name="train.py"), ["lr=1e-3,3e-4"], processes=2)  # doctest: +SKIP
    0
    """
    settings = sweep.grid(specs)
    check_processes(processes)
    with prepared(script, settings, root=root, name=name) as (runs, notes):
        for note in notes:
            _say(note)
    failed = DONE
    for number, (run, values) in enumerate(zip(runs, settings, strict=True), start=1):
        _say(f"{number} of {len(runs)}: {sweep.label(values)} in {run.path}")
        code = _run(run, program(run, script, values), processes)
        note_end(run, code)
        failed = failed or code
        if code in (INTERRUPTED, TERMINATED):
            break
    _say(f"to see them side by side: headway compare {runs[0].path}")
    return failed


def _run(run: Run, program: Program, processes: int) -> int:
    environ = program.environment(os.environ) | {"HEADWAY_RUN": str(run.path)}
    return Agent(program.command, processes=processes, environ=environ, cwd=program.cwd).run()


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)
