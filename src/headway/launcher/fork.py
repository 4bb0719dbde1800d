"""Forks: runs that begin with the newest checkpoint of another one, which stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace

from headway.checkpoint.format.directory import list_steps
from headway.errors import UsageError
from headway.launcher.code import snapshot
from headway.launcher.program import Program
from headway.run import Run
from headway.run.arguments import split_command


def fork(run: Run, program: Program) -> tuple[Run, Program]:
    """Makes a run for this program that begins with the newest checkpoint of `run`, and with its copy of the code.

    Returns it with its program, which starts in its own directory.

    >>> fork(run, program)[0].parent_checkpoint()  # doctest: +SKIP
    PosixPath('/home/me/runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000')
    """
    steps = list_steps(run.checkpoints_dir)
    if not steps:
        raise UsageError(f"{run.id} has no checkpoint to fork it from: start a new run")
    code = snapshot.load(run) if run.info()["code"].get("snapshot") else None
    with chdir(code.directory if code else program.cwd or "."):  # which the record of a run names
        made = Run.create(
            run.path.parent,
            name=run.name,
            command=_pinned_command(run, program.command) if code else program.command,
            world={"world_size": program.nproc, "nodes": 1},
        )
    made.set_parent(run.checkpoint_dir(max(steps)))
    if code is None:
        return made, program
    snapshot.adopt(made, run)
    own = snapshot.load(made)
    command = [str(own.script) if word == str(code.script) else word for word in program.command]
    return made, replace(program, command=command, cwd=str(own.start))


def _pinned_command(run: Run, command: Sequence[str]) -> list[str]:
    """Returns the command as a run with a copy of its code records it: it begins with the name of the script."""
    return [run.info()["command"][0], *split_command(command)[1]]
