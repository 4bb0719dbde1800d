"""The job script: a pure function from settings to text. People may read it, keep it, and submit it by hand.

What came from people is not in it, but for what they wrote as shell lines: the command, its arguments and variables
wait in job.json, names and settings are checked when they are made, and paths are quoted.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from headway.errors import UsageError
from headway.launcher.targets import Slurm

_TEXT = """\
#!/bin/bash
# What SLURM runs for {run}. Made by headway; it may be submitted again by hand.
{directives}
{setup}
run={quoted_run}
{pre}# One agent per node starts the ranks there. `--wait=0`: nodes that end early do not hurry the others.
srun {step} \\
  {python} -P -m headway agent --run "$run"
# srun's exit status does not say how the run ended; what the agents have left in the run directory does.
# The status of this last command is the job's.
exec {python} -P -m headway.launcher.epilogue "$run" $?
"""

_PRE = """\
# Data for the ranks goes to each node's own disk first: a step of its own, which may take its time.
srun {step} \\
  {python} -P -m headway.launcher.prologue "$run" || exec {python} -P -m headway.launcher.epilogue "$run" $?
"""


def job_script(target: Slurm, *, run: Path, python: str) -> str:
    """The text of the job script.

    For an array, `run` is a folder whose entries 0, 1, ... lead to the run directories.

    >>> print(job_script(Slurm(nodes=2), run=Path("/runs/x"), python="/bin/python")[:11])
    #!/bin/bash
    """
    path = _quoted(run) + ('/"$SLURM_ARRAY_TASK_ID"' if target.array else "")
    step, interpreter = " ".join(step_options(target)), _quoted(Path(python))
    return _TEXT.format(
        run=run.name,
        directives="\n".join(f"#SBATCH {option}" for option in options(target)),
        setup="".join(f"\n{line}" for line in target.setup) + ("\n" if target.setup else ""),
        quoted_run=path,
        pre=_PRE.format(step=step, python=interpreter) if target.pre else "",
        step=step,
        python=interpreter,
    )


def options(target: Slurm) -> list[str]:
    """The options of sbatch, in the words of a command line.

    They stand in the script, and on sbatch's command line as well: a user's SBATCH_* variables override the script.

    >>> options(Slurm(time="30"))[-4:]
    ['--time=30', '--open-mode=append', '--signal=USR2@120', '--requeue']
    """
    given: dict[str, object] = {
        "nodes": target.nodes,
        "ntasks-per-node": target.processes_per_node,
        "gpus-per-node": target.gpus_per_node,
        "cpus-per-task": target.cpus_per_task,
        "mem": target.mem,
        "time": target.time,
        "partition": target.partition,
        "account": target.account,
        "qos": target.qos,
        "constraint": target.constraint,
        "exclusive": target.exclusive,
        **target.extra,
        "open-mode": "append",
        # to the steps, where the ranks are: not B:. A Pipeline watches the clock itself; scripts with a loop of their
        # own, and the copying of data before the ranks start, know by this alone that their time is nearly over
        "signal": f"USR2@{target.signal_lead}",
        "requeue" if target.requeue else "no-requeue": True,
    }
    return [_option(name, value) for name, value in given.items() if value is not None and value is not False]


def step_options(target: Slurm) -> list[str]:
    """The options of srun: one task per node, which has all that the job was given there."""
    cpus = target.cpus_per_task and target.cpus_per_task * target.processes_per_node
    given = {
        "nodes": target.nodes,
        "ntasks": target.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "cpu-bind": None if cpus else "none",  # the site decides how many CPUs; the one task may use them all
        "kill-on-bad-exit": 1,
        "wait": 0,
    }
    return [_option(name, value) for name, value in given.items() if value is not None]


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _quoted(path: Path) -> str:
    if not str(path).isprintable():
        raise UsageError(f"{str(path)!r:.120} holds characters that cannot be printed; choose another folder")
    return shlex.quote(str(path))
