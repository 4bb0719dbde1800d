"""Explains SLURM's refusals: what was requested, what is available, what to change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from difflib import get_close_matches

from headway.errors import HeadwayError, SchedulerUnreachable, UsageError
from headway.schedulers.base import JobRequest
from headway.schedulers.slurm.client import SlurmClient
from headway.schedulers.slurm.script import node_range
from headway.system import ownership


def refusal(complaint: str, request: JobRequest, client: SlurmClient) -> HeadwayError:
    """Returns the error for a complaint of sbatch; `client` finds out what is available instead."""
    for pattern, explain in _EXPLAINED:
        if re.search(pattern, complaint, re.IGNORECASE):
            return UsageError(explain(request, client))
    if re.search("unable to contact|connection refused|no controller", complaint, re.IGNORECASE):
        return SchedulerUnreachable(
            "SLURM's controller does not answer (see: scontrol ping); try again later, or ask the site"
        )
    if re.search("could not establish a configuration source", complaint, re.IGNORECASE):
        return UsageError(
            "SLURM's programs are installed, but no cluster is configured: submit from a login node, or set SLURM_CONF"
        )
    first = re.sub(r"^\w+: (error: )?", "", complaint.strip().partition("\n")[0])
    return UsageError(f"SLURM refuses the job: {first or 'no reason given'}")


def _partition(request: JobRequest, client: SlurmClient) -> str:
    wanted = _wanted(request, "partition")
    what = f"there is no partition {wanted!r}" if wanted else "give --partition"
    return f"{what}{_instead(wanted, client.run('sinfo', '-ho', '%R').lines)}"


def _account(request: JobRequest, client: SlurmClient) -> str:
    account = _wanted(request, "account")
    found = client.run("sacctmgr", "-nP", "show", "assoc", f"user={ownership.user_name()}", "format=account")
    which = f"account {account!r}" if account else "your default account"
    return f"{which} may not be charged for this partition{_instead(account, found.lines)}"


def _qos(request: JobRequest, client: SlurmClient) -> str:
    wanted = _wanted(request, "qos")
    found = client.run("sacctmgr", "-nP", "show", "qos", "format=name")
    what = f"qos {wanted!r} is not available to you" if wanted else "give --qos"
    return f"{what}{_instead(wanted, found.lines)}"


def _time(request: JobRequest, client: SlurmClient) -> str:
    found = client.run("sinfo", "-ho", "%R at most %l", *partition_option(request)).lines
    limits = ", ".join(sorted(set(found)))
    wanted = _wanted(request, "time", "SBATCH_TIMELIMIT")
    what = f"time={wanted!r} is not allowed here" if wanted else "give --time"
    return f"{what}; limits: {limits or 'see sinfo'}"


def _nodes(request: JobRequest, client: SlurmClient) -> str:
    options = request.options
    wanted = f"{node_range(request)} nodes" if node_range(request) != "1" else "a node"
    needs = [f"{request.nproc_per_node * (options.get('cpus-per-task') or 1)} CPUs"]
    if options.get("gpus-per-node"):
        needs.append(f"{options['gpus-per-node']} GPUs")
    if options.get("mem"):
        needs.append(f"{options['mem']} of memory")
    if options.get("constraint"):
        needs.append(f"the features {options['constraint']}")
    found = client.run(
        "sinfo", "-ho", "%R: %D nodes with %c CPUs, %m MB, %G", *partition_option(request)
    ).lines
    there = "; ".join(sorted(set(found)))
    return f"no nodes here can serve {wanted} with {', '.join(needs)}; there are: {there or 'see sinfo'}"


def _feature(request: JobRequest, client: SlurmClient) -> str:
    wanted = _wanted(request, "constraint")
    lines = client.run("sinfo", "-ho", "%f").lines
    found = {name for line in lines for name in line.split(",") if name != "(null)"}
    return f"no node has the features {wanted!r}{_instead(wanted, sorted(found))}"


def _array(request: JobRequest, client: SlurmClient) -> str:
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", client.run("scontrol", "show", "config").out)
    most = (
        f"at most {found[1]} jobs" if found else "fewer jobs (see: scontrol show config | grep MaxArraySize)"
    )
    return f"SLURM refuses an array of {request.array_size} jobs: an array has {most} here; leave some values out"


def _limits(request: JobRequest, _: SlurmClient) -> str:
    time = request.options.get("time")
    wanted = f"{node_range(request)} nodes x {request.nproc_per_node} tasks" + (
        f" for {time}" if time else ""
    )
    see = f"sacctmgr show assoc user={ownership.user_name()}"
    return f"SLURM's limits for you or this partition forbid {wanted}; ask for less, or see: {see}"


_EXPLAINED: tuple[tuple[str, Callable[[JobRequest, SlurmClient], str]], ...] = (
    ("invalid partition", _partition),
    ("invalid account", _account),
    ("invalid qos", _qos),
    ("time limit (specification )?.*(invalid|exceeds)|invalid --time", _time),
    ("invalid feature", _feature),
    ("invalid job array", _array),
    (
        "node configuration is not available|node count specification invalid|more processors|too many nodes",
        _nodes,
    ),
    ("policy|accounting/QOS|limit", _limits),
)


def partition_option(request: JobRequest) -> list[str]:
    """Returns the option by which sinfo shows only the partitions of a job; sbatch reads the variable, too."""
    partition = _wanted(request, "partition")
    return ["-p", partition] if partition else []


def _wanted(request: JobRequest, option: str, variable: str = "") -> str:
    """Returns the value of an option, which sbatch may have read from a variable; empty if there is none."""
    variable = variable or f"SBATCH_{option.upper()}"
    return str(request.options.get(option) or os.environ.get(variable) or "")


def _instead(wrong: str, there: list[str]) -> str:
    if not there:
        return "; ask the site which there are"
    close, names = get_close_matches(wrong, there, n=1), ", ".join(dict.fromkeys(there))
    return f"; did you mean {close[0]!r}? There are: {names}" if close else f"; there are: {names}"
