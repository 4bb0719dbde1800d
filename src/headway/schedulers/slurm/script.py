"""The job script: a pure function from a request to text. People may read it, keep it, and submit it by hand.

It contains no text of users except for their own shell lines: the command, its arguments and variables are in job.json,
names and settings were checked, and paths are quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from headway.errors import UsageError
from headway.schedulers.base import JobRequest

_TEXT = """\
#!/bin/bash
# What SLURM runs for {run}. Made by headway; {by_hand}.
{directives}
{setup}
run={quoted_run}
# If this is submitted by hand, SLURM writes elsewhere: the output then goes where that of the other starts is.
log="$run"/{log}
if ! [ /proc/self/fd/1 -ef "$log" ] && {{ : >> "$log"; }} 2> /dev/null; then
  echo "the output goes to $log"
  exec >> "$log" 2>&1
fi
{steps}"""

_OF_AN_ARRAY = "by hand, submit the job.sh of a run: this one needs the number that --array gives a job"

_AGENTS = """\
# One agent per node starts the ranks there. `--wait=0`: a node that ends early does not limit the others.
{step} \\
  {agent} "$run" &
# srun's exit status does not say how the run ended; what the agents have left in the run directory does.
# This last command waits for srun, ends it if it outlives the agents, and has the job's exit status.
exec {epilogue} "$run" --step $!{again}
"""

_AGAIN = """ \\
  {step} \\
  {agent} "$run"\
"""
"""a range of nodes: if the ranks cannot share a batch, the last command starts them again on fewer"""

_PREPARED = """\
# The nodes are prepared first, for example with data on their own disks: in a step of its own, which may take long.
{step} \\
  {prologue} "$run" &
# This last command waits for it, ends it if a node is lost, and has the job's exit status. Then it runs the rest:
# one agent per node starts the ranks there. `--wait=0`: a node that ends early does not limit the others.
exec {epilogue} "$run" --prologue $! \\
  {step} \\
  {agent} "$run"
"""


def job_script(request: JobRequest) -> str:
    """Returns the text of the job script."""
    path = _quoted(str(request.directory)) + ('/"$SLURM_ARRAY_TASK_ID"' if request.is_array else "")
    step, epilogue = " ".join(step_command(request)), _quoted(*request.epilogue)
    agent = _quoted(*request.agent)
    steps = (_PREPARED if request.prologue else _AGENTS).format(
        step=step,
        prologue=_quoted(*request.prologue or ()),
        agent=agent,
        epilogue=epilogue,
        again=_AGAIN.format(step=step, agent=agent) if _is_range(request) else "",
    )
    return _TEXT.format(
        run=request.directory.name,
        by_hand=_OF_AN_ARRAY if request.is_array else "it may be submitted again by hand",
        directives="\n".join(f"#SBATCH {option}" for option in options(request)),
        setup="".join(f"\n{line}" for line in request.setup) + ("\n" if request.setup else ""),
        quoted_run=path,
        log=_quoted(str(request.log)),
        steps=steps,
    )


def options(request: JobRequest) -> list[str]:
    """Returns the options of sbatch, as words of a command line.

    They are in the script and on sbatch's command line, because a user's SBATCH_* variables override the script.
    """
    given: dict[str, object] = {
        "nodes": node_range(request),
        "ntasks-per-node": request.nproc_per_node,
        **request.options,
        **(_per_node(request) if _is_range(request) else {}),
        "open-mode": "append",
        # to the steps, where the ranks are: not B:. A Pipeline watches the clock itself; scripts with a loop of their
        # own, and the copying of data before the ranks start, know only by this that their time is nearly over
        "signal": f"USR2@{request.signal_lead_s}",
        "requeue" if request.requeue else "no-requeue": True,
    }
    return [_option(name, value) for name, value in given.items() if value is not None and value is not False]


def submit_options(request: JobRequest, tasks: Sequence[int] | None = None) -> list[str]:
    """Returns the options of sbatch that are not in the script. No shell parses the names and paths in them."""
    log = str(request.directory).replace("%", "%%") + ("/%a" if request.is_array else "")
    limit = f"%{request.array_limit}" if request.array_limit else ""
    given = [f"--array={_task_list(tasks)}{limit}"] if tasks is not None else []
    given += [f"--dependency=afterany:{request.after.job_id}"] if request.after else []
    return [*given, "--parsable", f"--job-name={request.name}", f"--output={log}/{request.log}"]


def step_command(request: JobRequest) -> list[str]:
    """Returns srun with its options: one task per node, which gets all of the job's resources there."""
    per_rank = request.options.get("cpus-per-task")
    cpus = per_rank and per_rank * request.nproc_per_node
    nodes = '"$SLURM_JOB_NUM_NODES"' if _is_range(request) else request.nodes  # as many as the job was given
    given = {
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "cpu-bind": None if cpus else "none",  # the site decides how many CPUs; the one task may use them all
        "kill-on-bad-exit": 1,
        "wait": 0,
    }
    return ["srun", *(_option(name, value) for name, value in given.items() if value is not None)]


def resized_step(step: Sequence[str], nodes: int) -> list[str]:
    """Returns the command of a step on another number of nodes.

    >>> resized_step(["srun", "--nodes=3", "--ntasks=3", "headway"], 2)
    ['srun', '--nodes=2', '--ntasks=2', 'headway']
    """
    return [re.sub(r"^--(nodes|ntasks)=\d+$", rf"--\1={nodes}", word) for word in step]


def node_range(request: JobRequest) -> str:
    """Returns the number of nodes in the form of sbatch: 2, or 1-2."""
    return f"{request.nodes}-{request.max_nodes}" if _is_range(request) else str(request.nodes)


def _is_range(request: JobRequest) -> bool:
    return request.max_nodes not in (None, request.nodes)


def _per_node(request: JobRequest) -> dict[str, object]:
    """Returns the options for what each node of a range must have.

    They do not count tasks: SLURM would keep the number of the first start, and wait for as many after a requeue.
    """
    cpus = request.options.get("cpus-per-task") or 1
    return {"ntasks-per-node": None, "cpus-per-task": None, "mincpus": cpus * request.nproc_per_node}


def _task_list(tasks: Sequence[int]) -> str:
    """Formats a list of numbers for SLURM.

    >>> _task_list([0, 1, 2]), _task_list([3]), _task_list([1, 3])
    ('0-2', '3', '1,3')
    """
    if len(tasks) > 1 and list(tasks) == list(range(tasks[0], tasks[-1] + 1)):
        return f"{tasks[0]}-{tasks[-1]}"
    return ",".join(map(str, tasks))


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _quoted(*words: str) -> str:
    for word in words:
        if not word.isprintable():
            raise UsageError(
                f"{word!r:.120} holds characters that cannot be printed; choose another directory"
            )
    return shlex.join(words)
