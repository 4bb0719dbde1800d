"""The launch environment of this process: its rank, the number of ranks, its node. Read from variables only.

Launchers differ by data, not by code: each is an entry in a table of variable names. The order of the table matters,
because SLURM's variables are wrong under mpirun and torchrun (they count nodes, or are zero on every rank). A batch
script has SLURM_NTASKS=4 although it is one process, so SLURM counts only inside a job step. With MpiDefault=pmi2, a
common setting of sites, srun also sets the variables by which MPICH is recognized.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.errors import UsageError
from headway.system.environment import RENDEZVOUS

Environ = Mapping[str, str]

_MAX_PORT = 65_535
_DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(kind: str) -> None:
    """Raises `UsageError` unless ranks can compute on devices of this kind."""
    if kind not in _DEVICES:
        raise UsageError(f"device={kind!r:.80} is not a valid device; use one of {', '.join(_DEVICES)}")


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """The launcher's facts about this process. Those that it does not give are None until the ranks have joined."""

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
    """equal on all ranks of this launch and different from that of any other; None if the launcher gives none"""
    store_address: str | None = None
    """host:port of a store that the launcher or the user has chosen"""
    rendezvous_file: Path | None = None
    """the file through which ranks find each other, if a node agent or a test started them"""


def _unknown(environ: Environ) -> None:
    """Returns None: the launcher sets no such variable."""


def _is_not_sruns(environ: Environ) -> bool:
    """Whether mpiexec has set PMI_RANK, and not srun. mpiexec in a step of srun also sets the rank on the node."""
    own = [environ.get(name) for name in ("PMI_RANK", "PMI_SIZE")]
    sruns = [environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    return own != sruns or "MPI_LOCALRANKID" in environ


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables of one launcher, and functions for those that are more than a number."""

    name: str
    marker: str
    """the variable whose presence means that this launcher started us"""
    counts: Callable[[Environ], bool] = lambda _: True
    """whether it was really this launcher that set the marker"""
    rank: str
    world_size: str
    local_rank: str
    local_world_size: Callable[[Environ], int | None]
    node: str | None
    master: Callable[[Environ], str | None] = _unknown
    launch_id: Callable[[Environ], str | None] = _unknown
    store: Literal["ignored", "optional", "required"] = "optional"
    """what MASTER_ADDR and MASTER_PORT mean: torchrun always sets them; under srun and mpirun a user may"""


def detect(environ: Environ = os.environ) -> LaunchEnvironment:
    """Reads from the environment which launcher started this process, and as which rank.

    >>> detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).rank
    1
    """
    for launcher in _LAUNCHERS:
        if launcher.marker in environ and launcher.counts(environ):
            return _read(launcher, environ)
    return LaunchEnvironment(
        launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1, node=socket.gethostname()
    )


def _read(launcher: _Launcher, environ: Environ) -> LaunchEnvironment:
    rank = _number(environ, launcher.rank, launcher.name)
    world_size = _number(environ, launcher.world_size, launcher.name)
    if world_size < 1 or rank >= world_size:
        raise UsageError(
            f"{launcher.rank}={rank} is not a rank of {launcher.world_size}={world_size}; start the script through its "
            f"launcher, or unset these variables to run as one process"
        )
    node = environ.get(launcher.node) if launcher.node else None
    has_local_rank = launcher.local_rank in environ
    return LaunchEnvironment(
        launcher=launcher.name,
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, launcher.local_rank, launcher.name) if has_local_rank else None,
        local_world_size=launcher.local_world_size(environ),
        node=socket.gethostname() if node is None else f"node {node}",
        master=launcher.master(environ),
        launch_id=launcher.launch_id(environ),
        store_address=_store_address(launcher, environ),
        rendezvous_file=Path(environ[RENDEZVOUS]) if launcher.marker == RENDEZVOUS else None,
    )


def _number(environ: Environ, name: str, launcher: str) -> int:
    text = environ.get(name)
    if text is None:
        raise UsageError(f"this process looks like it was started by {launcher}, but {name} is not set")
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text[:40]!r} is not a whole number; {launcher} sets it: do not set it by hand"
        )
    return int(text)


def _store_address(launcher: _Launcher, environ: Environ) -> str | None:
    if launcher.store == "ignored":
        return None
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host and port:
        if not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
            raise UsageError(f"MASTER_PORT={port[:40]!r} is not a port: give a number from 1 to {_MAX_PORT}")
        return f"{host}:{port}"
    if launcher.store == "required":
        raise UsageError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: start the script with torchrun or "
            "`headway run`, or unset RANK and WORLD_SIZE to run as one process"
        )
    return None


def _from(variable: str, launcher: str) -> Callable[[Environ], int | None]:
    """Reads a number that may be missing."""

    def read(environ: Environ) -> int | None:
        return _number(environ, variable, launcher) if variable in environ else None

    return read


def _master_address(environ: Environ) -> str | None:
    """The host of rank 0, which node agents and torchrun set, and users of mpirun may set."""
    return environ.get("MASTER_ADDR") or None


def _slurm_tasks_here(environ: Environ) -> int | None:
    """The number of tasks on this node: nodes may have different numbers, so SLURM gives a list of them."""
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return None
    return _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[_number(environ, "SLURM_NODEID", "srun")]


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


def _slurm_master(environ: Environ) -> str | None:
    # the step's list: the job's may begin with a node on which no rank of this step runs
    return first_host(environ["SLURM_STEP_NODELIST"]) if "SLURM_STEP_NODELIST" in environ else None


def first_host(hostlist: str) -> str:
    """Returns the first host of a SLURM host list.

    >>> first_host("cn-l[084-085,090],gpu[1-3]")
    'cn-l084'
    """
    first = re.split(r",(?![^\[]*\])", hostlist)[0]  # at a comma outside brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _slurm_launch_id(environ: Environ) -> str:
    # a cluster that is set up again also counts jobs and steps from the start, but the address of srun differs
    parts = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
        "SLURM_SRUN_COMM_HOST",
        "SLURM_SRUN_COMM_PORT",
    )
    return "srun-" + "-".join(environ.get(part, "0") for part in parts)


def _open_mpi_launch_id(environ: Environ) -> str | None:
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return f"mpi-{namespace}" if namespace else None


def _mpich_launch_id(environ: Environ) -> str | None:
    # one proxy starts all ranks of a node; across nodes nothing in the environment is common
    if environ.get("MPI_LOCALNRANKS") == environ.get("PMI_SIZE"):
        return f"mpich-{socket.gethostname()}-{os.getppid()}"
    return None


_LAUNCHERS = (
    _Launcher(
        name="headway",
        marker=RENDEZVOUS,
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=_from("LOCAL_WORLD_SIZE", "headway"),
        node="GROUP_RANK",
        master=_master_address,
        store="ignored",
    ),
    _Launcher(
        name="torchrun",
        marker="RANK",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=_from("LOCAL_WORLD_SIZE", "torchrun"),
        node="GROUP_RANK",
        master=_master_address,
        store="required",
    ),
    _Launcher(
        name="mpi",  # Open MPI
        marker="OMPI_COMM_WORLD_RANK",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size=_from("OMPI_COMM_WORLD_LOCAL_SIZE", "mpi"),
        node=None,  # OMPI_COMM_WORLD_NODE_RANK is the rank on the node, not the node's number
        master=_master_address,
        launch_id=_open_mpi_launch_id,
    ),
    _Launcher(
        name="mpi",  # MPICH
        marker="PMI_RANK",
        counts=_is_not_sruns,
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size=_from("MPI_LOCALNRANKS", "mpi"),
        node=None,
        master=_master_address,
        launch_id=_mpich_launch_id,
    ),
    _Launcher(
        name="srun",
        marker="SLURM_STEP_ID",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is the job's
        local_rank="SLURM_LOCALID",
        local_world_size=_slurm_tasks_here,
        node="SLURM_NODEID",
        master=_slurm_master,
        launch_id=_slurm_launch_id,
    ),
)
