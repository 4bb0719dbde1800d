"""Who started this process, and which of how many is it? Read from the environment, nothing else.

Launchers differ by data, not by code: a table of variable names each. The order of the table matters, because SLURM's
variables lie under mpirun and torchrun (they count nodes, or are zero on every rank), and a batch script has
SLURM_NTASKS=4 though it is one process: SLURM counts only where a step is.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import UsageError
from headway.schedulers.slurm.hostlist import expand


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What the launcher says about this process. Facts it does not give are None and are worked out on joining."""

    launcher: str
    """headway, torchrun, mpi, srun or none"""
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node: str
    """a name for the node that is equal on all ranks of the node and differs between nodes"""
    master: str | None = None
    """the host of rank 0, where the launcher knows it"""
    launch_id: str | None = None
    """equal on all ranks of this launch and unlike that of any other; None if the launcher gives none"""
    store_address: str | None = None
    """host:port of a store that the launcher or the user has chosen"""


@dataclass(frozen=True, kw_only=True)
class _Variables:
    """The names under which one launcher tells a process its place."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None
    node: str | None
    marker: str
    """the variable whose presence means that this launcher started us"""


_HEADWAY = _Variables(
    launcher="headway",
    marker="HEADWAY_RENDEZVOUS",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
)
_TORCHRUN = _Variables(
    launcher="torchrun",
    marker="RANK",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
)
_OPEN_MPI = _Variables(
    launcher="mpi",
    marker="OMPI_COMM_WORLD_RANK",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    node=None,  # OMPI_COMM_WORLD_NODE_RANK is the rank on the node, not the node's number
)
_MPICH = _Variables(
    launcher="mpi",
    marker="PMI_RANK",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    node=None,
)
_SRUN = _Variables(
    launcher="srun",
    marker="SLURM_STEP_ID",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is the job's
    local_rank="SLURM_LOCALID",
    local_world_size=None,  # from SLURM_STEP_TASKS_PER_NODE: nodes may hold different numbers
    node="SLURM_NODEID",
)
_TABLE = (_HEADWAY, _TORCHRUN, _OPEN_MPI, _MPICH, _SRUN)


def detect(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Finds this process's place from its environment.

    >>> detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).rank
    1
    """
    for names in _TABLE:
        if names.marker in environ:
            return _place(names, environ)
    return LaunchEnvironment(
        launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1, node=socket.gethostname()
    )


def _place(names: _Variables, environ: Mapping[str, str]) -> LaunchEnvironment:
    rank = _number(environ, names.rank, names.launcher)
    world_size = _number(environ, names.world_size, names.launcher)
    if world_size < 1 or rank >= world_size:
        raise UsageError(
            f"{names.rank}={rank} is not a rank of {names.world_size}={world_size}; start the script through its "
            f"launcher, or unset these variables to run as one process"
        )
    host = socket.gethostname()
    node = environ.get(names.node) if names.node else None
    return LaunchEnvironment(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, names.local_rank, names.launcher)
        if names.local_rank in environ
        else None,
        local_world_size=_local_world_size(names, environ),
        node=host if node is None else f"node {node}",
        master=_master(names, environ),
        launch_id=_launch_id(names, environ),
        store_address=_store_address(names, environ),
    )


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None:
        raise UsageError(f"this process looks like it was started by {launcher}, but {name} is not set")
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text[:40]!r} is not a whole number; it is set by {launcher}, do not set it by hand"
        )
    return int(text)


def _local_world_size(names: _Variables, environ: Mapping[str, str]) -> int | None:
    if names is _SRUN and "SLURM_STEP_TASKS_PER_NODE" in environ:
        return _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[_number(environ, "SLURM_NODEID", "srun")]
    if names.local_world_size in environ and names.local_world_size:
        return _number(environ, names.local_world_size, names.launcher)
    return None


def _tasks_per_node(text: str) -> list[int]:
    """Reads SLURM's count of tasks on each node: `2(x3),1` is three nodes with two tasks and one with one."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE={text[:200]!r} cannot be read; expected a form like '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _master(names: _Variables, environ: Mapping[str, str]) -> str | None:
    if names is _SRUN and "SLURM_STEP_NODELIST" in environ:
        # the step's list: the job's begins with a node where no rank of this step may run
        return expand(environ["SLURM_STEP_NODELIST"])[0]
    return None


def _launch_id(names: _Variables, environ: Mapping[str, str]) -> str | None:
    if names is _SRUN:
        # job and step numbers start again with a new cluster, srun's own address does not
        parts = (
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_RESTART_COUNT",
            "SLURM_SRUN_COMM_HOST",
            "SLURM_SRUN_COMM_PORT",
        )
        return "srun-" + "-".join(environ.get(part, "0") for part in parts)
    if names is _OPEN_MPI:
        space = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return f"mpi-{space}" if space else None
    if names is _MPICH and environ.get("MPI_LOCALNRANKS") == environ.get("PMI_SIZE"):
        # one proxy starts all ranks of a node; across nodes nothing in the environment is common
        return f"mpich-{socket.gethostname()}-{os.getppid()}"
    return None


def _store_address(names: _Variables, environ: Mapping[str, str]) -> str | None:
    """torchrun always names a store; under srun and mpirun a user may, and is taken at his word."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if names is _HEADWAY:
        return None
    if host and port:
        return f"{host}:{port}"
    if names is _TORCHRUN:
        raise UsageError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: start the script with torchrun or "
            "`headway run`, or unset RANK and WORLD_SIZE to run as one process"
        )
    return None
