"""Scripts on this machine beyond a plain run: sweeps (one run after the other), resumed runs, and smoke runs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headway.errors import DONE, INTERRUPTED, TERMINATED, Stopped, UsageError
from headway.launcher import sweep
from headway.launcher.agent.agent import Agent, check_nproc
from headway.launcher.code import workspace
from headway.launcher.enqueue import set_end_aside
from headway.launcher.program import Program
from headway.launcher.submit_script import Script, check_script, make_program, prepare_runs
from headway.run import Run
from headway.run.job_record import read_starts, run_recorded
from headway.system import environment
from headway.system.log import logger
from headway.system.redact import REDACTED

_PROMPTS = (
    *("ipykernel", "ipykernel_launcher", "colab_kernel_launcher"),
    *("ipython", "ipython3", "IPython", "pydevconsole"),
)
"""modules and scripts that read a program from a person"""


def run_sweep(script: Script, specs: Sequence[str], *, nproc: int = 1) -> int:
    """Runs a script once for each setting, each in its own run directory and all from one copy of the code.

    Returns the exit code of the first run that failed. Ctrl-C, another signal, or the end of the job's time ends it.

    >>> run_sweep(Script(name="train.py"), ["lr=1e-3,3e-4"], nproc=2)  # doctest: +SKIP
    0
    """
    settings, root = sweep.grid(specs), Path("runs")
    check_nproc(nproc)
    name, world = check_script(script, root=root), {"world_size": nproc, "nodes": 1}
    with prepare_runs(script, settings, root=root, name=name, world=world) as (runs, notes):
        for note in notes:
            logger.info(note)
    failed = DONE
    for number, (run, values) in enumerate(zip(runs, settings, strict=True), start=1):
        what = f"{number} of {len(runs)}: {sweep.label(values)} in {run.path}"
        if read_starts(run) or run.info()["attempts"]:
            logger.info(f"{what} was skipped: another command has started it meanwhile")
            continue
        logger.info(what)
        agent = _agent_in(run, replace(make_program(run, script, values), nproc=nproc))
        code = run_recorded(run, agent.run)
        failed = failed or code
        if agent.was_signaled or code in (INTERRUPTED, TERMINATED, Stopped.exit_code):
            if number < len(runs):
                failed = failed or INTERRUPTED  # some were not even started
            break
    logger.info(f"to see them side by side: headway compare {runs[0].shell_path}")
    return failed


def _agent_in(run: Run, program: Program) -> Agent:
    """Returns the agent of ranks that train in this run directory."""
    workspace.prepare(run)
    environ = program.environment(os.environ) | {environment.RUN: str(run.path)}
    return Agent(program.command, nproc=program.nproc, environ=environ, cwd=program.cwd)


def local_program(run: Run, *, nproc: int | None = None) -> Program:
    """Returns the script that ran on this machine, from its record; for a run of a sweep, from its copy of the code.

    `nproc` overrides the recorded number of ranks, if the record has one.

    >>> local_program(Run.open("runs/digits-2026.11.15-14.30-x7k2")).command  # doctest: +SKIP
    ['python', 'train.py', '--lr', '3e-4']
    """
    info = run.info()
    attempts, command = info["attempts"], list(info["command"])
    world = (attempts[-1]["world"] if attempts else info["world"]) or {}
    if any(REDACTED in word for word in [*command, info["cwd"]]):
        raise UsageError(
            f"the record of {run.id} leaves out a secret of its command line: start it by hand, with "
            f"{environment.RUN}={run.shell_path}"
        )
    is_pinned = bool(info["code"].get("snapshot"))
    if nproc is None and is_pinned and "world_size" not in world:
        raise UsageError(
            f"the record of {run.id} does not say on how many processes it runs: "
            f"headway resume {run.shell_name} --nproc N"
        )
    nproc = nproc or int(world.get("world_size", 1))
    if is_pinned:
        name, *args = command
        script = Script(name=name, args=args, module=info["code"]["snapshot"]["script"] is None)
        return replace(make_program(run, script, {}), nproc=nproc)
    if world.get("nodes", 1) > 1:
        raise UsageError(
            f"{run.id} ran on {world['nodes']} nodes, and headway did not submit it: start it as before, with "
            f"{environment.RUN}={run.shell_path}"
        )
    if _is_of_a_prompt(command):
        raise UsageError(
            f"{run.id} was started at a prompt or in a notebook: run it there again, with "
            f"{environment.RUN}={run.shell_path}"
        )
    if not Path(info["cwd"]).is_dir():
        raise UsageError(
            f"{run.id} was started in {info['cwd']}, which no longer exists"
            f": start its command by hand, with {environment.RUN}={run.shell_path}"
        )
    return Program(command=command, nproc=nproc, cwd=info["cwd"])


def _is_of_a_prompt(command: Sequence[str]) -> bool:
    """Whether a command line starts a Python that reads its program from a person: a prompt, or that of a notebook.

    >>> _is_of_a_prompt(["python3", "-X", "dev"]), _is_of_a_prompt(["python3", "-um", "mypackage.train"])
    (True, False)
    """
    words = iter(command)
    if not re.match("python|pypy", Path(next(words, "")).name):
        return False
    for word in words:
        option = re.match("-([a-zA-Z]*?)([cmWX])(.*)", word)
        if option is None and word.startswith("-") and word != "-":
            continue
        value = (option[3] or next(words, "")) if option else word
        if option is None or option[2] == "m":
            return word == "-" or Path(value).name.removesuffix(".py") in _PROMPTS
        if option[2] == "c":
            return False
    return True


def resume_here(run: Run, program: Program) -> int:
    """Runs the script of a run again, on this machine and in its run directory; returns its exit code."""
    check_nproc(program.nproc)
    agent = _agent_in(run, program)
    if sweep.member(run) is None:
        return agent.run()
    set_end_aside(run)
    return run_recorded(run, agent.run)


def run_smoke(command: Sequence[str], *, nproc: int) -> int:
    """Runs the script twice, a few steps each time; the second time it resumes from the first run's checkpoint.

    The run directory is temporary, and kept if anything fails.
    """
    directory = tempfile.mkdtemp(prefix="headway-smoke-")
    run = Run.create(directory, name="smoke", command=command)
    for part, expected in (("save", Stopped.exit_code), ("resume", DONE)):
        environ = {**os.environ, environment.RUN: str(run.path), environment.SMOKE: part}
        code = Agent(command, nproc=nproc, environ=environ).run()
        if not run.info()["attempts"]:
            shutil.rmtree(directory)
            if code:
                return code
            raise UsageError("the script ran no pipeline, so there is nothing to test: call pipe.run() in it")
        if code != expected:
            logger.error(f"the smoke run failed in the part {part!r}; it is kept in {run.path}")
            return code or 1
    shutil.rmtree(directory)
    logger.info("smoke run passed: two steps, a validation, a save, and a step after resuming")
    return DONE
