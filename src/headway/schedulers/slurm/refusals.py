"""SLURM's refusals in words that help: what was asked for, what there is, what to change."""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches

from headway.errors import HeadwayError, UsageError
from headway.launcher.targets import Slurm


def refusal(said: str, target: Slurm) -> HeadwayError:
    """The error for what sbatch said."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in said.strip().splitlines()] or [
        "no reason given"
    ]
    for pattern, explain in _EXPLAINED:
        if re.search(pattern, said, re.IGNORECASE):
            return UsageError(explain(target))
    if re.search("unable to contact|connection refused|no controller", said, re.IGNORECASE):
        return HeadwayError(
            "SLURM's controller does not answer (see: scontrol ping); try again later, or ask the site"
        )
    if re.search("could not establish a configuration source", said, re.IGNORECASE):
        return UsageError(
            "SLURM's programs are here, but belong to no cluster: submit from a login node, or set SLURM_CONF"
        )
    return UsageError(f"SLURM refuses the job: {lines[0]}")


def _partition(target: Slurm) -> str:
    return f"there is no partition {target.partition!r}{_instead(str(target.partition), _ask('sinfo', '-ho', '%R'))}"


def _account(target: Slurm) -> str:
    found = _ask("sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account")
    which = f"account {target.account!r}" if target.account else "your default account"
    return f"{which} may not be charged for this partition{_instead(target.account or '', found)}"


def _qos(target: Slurm) -> str:
    found = _ask("sacctmgr", "-nP", "show", "qos", "format=name")
    return f"there is no qos {target.qos!r} for you{_instead(str(target.qos), found)}"


def _time(target: Slurm) -> str:
    limits = ", ".join(sorted(set(_ask("sinfo", "-ho", "%R at most %l", *_of(target)))))
    return f"time={target.time!r} is not allowed here; limits: {limits or 'see sinfo'}"


def _nodes(target: Slurm) -> str:
    asked = f"{target.nodes} nodes" if target.nodes > 1 else "a node"
    needs = [f"{target.processes_per_node * (target.cpus_per_task or 1)} CPUs"]
    needs += [f"{target.gpus_per_node} GPUs"] if target.gpus_per_node else []
    needs += [f"{target.mem} of memory"] if target.mem else []
    needs += [f"the features {target.constraint}"] if target.constraint else []
    there = "; ".join(sorted(set(_ask("sinfo", "-ho", "%R: %D nodes with %c CPUs, %m MB, %G", *_of(target)))))
    return f"no nodes here can serve {asked} with {', '.join(needs)}; there are: {there or 'see sinfo'}"


def _feature(target: Slurm) -> str:
    found = {name for line in _ask("sinfo", "-ho", "%f") for name in line.split(",") if name != "(null)"}
    return f"no node has the features {target.constraint!r}{_instead(str(target.constraint), sorted(found))}"


def _limits(target: Slurm) -> str:
    asked = f"{target.nodes} nodes x {target.processes_per_node} tasks" + (
        f" for {target.time}" if target.time else ""
    )
    see = f"sacctmgr show assoc user={getpass.getuser()}"
    return f"SLURM's limits for you or this partition forbid {asked}; ask for less, or see: {see}"


_EXPLAINED: tuple[tuple[str, Callable[[Slurm], str]], ...] = (
    ("invalid partition", _partition),
    ("invalid account", _account),
    ("invalid qos", _qos),
    ("time limit (specification )?.*(invalid|exceeds)|invalid --time", _time),
    ("invalid feature", _feature),
    (
        "node configuration is not available|node count specification invalid|more processors|too many nodes",
        _nodes,
    ),
    ("policy|accounting/QOS|limit", _limits),
)


def _of(target: Slurm) -> list[str]:
    return ["-p", target.partition] if target.partition else []


def _instead(wrong: str, there: list[str]) -> str:
    if not there:
        return "; ask the site which there are"
    close = get_close_matches(wrong, there, n=1)
    return (
        f"; did you mean {close[0]!r}? There are: " + ", ".join(dict.fromkeys(there))
        if close
        else ("; there are: " + ", ".join(dict.fromkeys(there)))
    )


def _ask(*command: str) -> list[str]:
    """The lines that a program of SLURM answers; none if it cannot."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return (
            [line.strip() for line in done.stdout.splitlines() if line.strip()]
            if done.returncode == 0
            else []
        )
    return []
