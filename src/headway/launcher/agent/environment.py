"""The environment of a rank: torchrun's variables, its share of the CPUs, a directory for compiled kernels."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import UsageError
from headway.system import files, ownership
from headway.system.limits import usable_cpus
from headway.system.log import logger


@final
@dataclass(frozen=True, kw_only=True)
class AgentPlacement:
    """Where the ranks of one agent are among all ranks."""

    first_rank: int
    nproc: int
    world_size: int
    first_local_rank: int
    """not 0 where several agents share a node, as under `mpirun -n 4 headway agent`"""
    local_world_size: int
    node: int
    nodes: int
    master: str
    port: int


def place_agent(members: list[dict[str, Any]], number: int) -> AgentPlacement:
    """Returns where the ranks of agent `number` are. Agents may have different numbers of ranks, and share hosts.

    >>> members = [{"host": "a", "nproc": 2, "port": 1}, {"host": "b", "nproc": 1, "port": 2}]
    >>> placed = place_agent(members, 1)
    >>> placed.first_rank, placed.first_local_rank, placed.node, placed.world_size
    (2, 0, 1, 3)
    """
    hosts = list(dict.fromkeys(member["host"] for member in members))
    me = members[number]
    here = [member for member in members if member["host"] == me["host"]]
    before = members[:number]
    return AgentPlacement(
        first_rank=sum(member["nproc"] for member in before),
        nproc=me["nproc"],
        world_size=sum(member["nproc"] for member in members),
        first_local_rank=sum(member["nproc"] for member in before if member["host"] == me["host"]),
        local_world_size=sum(member["nproc"] for member in here),
        node=hosts.index(me["host"]),
        nodes=len(hosts),
        master=members[0]["host"] if len(hosts) > 1 else "127.0.0.1",
        port=members[0]["port"],
    )


def rank_environment(placement: AgentPlacement, index: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one rank, under torchrun's names; `index` counts the ranks of this agent."""
    variables = {
        "RANK": placement.first_rank + index,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.first_local_rank + index,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "GROUP_RANK": placement.node,
        "GROUP_WORLD_SIZE": placement.nodes,
        "MASTER_ADDR": placement.master,
        "MASTER_PORT": placement.port,
        # ranks that share the cores must not each start a thread per core
        "OMP_NUM_THREADS": environ.get(
            "OMP_NUM_THREADS", max(1, cores(environ) // placement.local_world_size)
        ),
    }
    return {name: str(value) for name, value in variables.items()}


def cores(environ: Mapping[str, str]) -> int:
    """Returns how many cores the ranks of this node share: a job may have fewer than the kernel lets it use."""
    node = schedulers.node(environ)
    return min(usable_cpus(), node.cpus) if node and node.cpus else usable_cpus()


def cpu_shares(nproc: int, environ: Mapping[str, str]) -> list[set[int]] | None:
    """Returns the CPUs of each rank, neighboring ones together; None if the agent does not assign any.

    On a node that a scheduler allocated, the agent has the CPUs of the job, and nothing else divides them. mpirun binds
    its own processes, and a machine without a scheduler has other users.
    """
    if schedulers.node(environ) is None or "sched_getaffinity" not in vars(os):
        return None
    return split_cpus(sorted(os.sched_getaffinity(0), key=_topology_of), nproc)


def split_cpus(cpus: Sequence[int], nproc: int) -> list[set[int]] | None:
    """Splits a list into equal parts; the first ones are longer by one if there is a remainder.

    >>> split_cpus([0, 1, 2, 3, 4], 2)
    [{0, 1, 2}, {3, 4}]
    """
    if nproc < 2 or len(cpus) < nproc:
        return None
    size, larger = divmod(len(cpus), nproc)
    ends = [index * size + min(index, larger) for index in range(nproc + 1)]
    return [set(cpus[begin:end]) for begin, end in pairwise(ends)]


def _topology_of(cpu: int) -> tuple[int, int, int]:
    """Returns the sort key that puts threads of a core, and cores of a socket, side by side."""
    directory = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((directory / name).read_text()) for name in ("physical_package_id", "core_id"))
        return package, core, cpu
    except (OSError, ValueError):
        return 0, cpu, cpu


def kernel_caches(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns where a rank keeps compiled kernels: on the node's own disk, one directory per rank, for later jobs, too.

    Home directories are on network file systems, where thousands of small files are slow and ranks conflict.
    """
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    wanted = {name: kind for name, kind in names.items() if name not in environ}
    if not wanted:
        return {}
    root = private_directory(Path(schedulers.local_disk(environ) or tempfile.gettempdir()))
    if root is None:
        return {}
    return {name: str(root / f"{kind}-{local_rank}") for name, kind in wanted.items()}


def private_directory(parent: Path) -> Path | None:
    """Makes a directory that only this user can write, or returns None: its files are executed, and /tmp is shared."""
    try:
        ownership.check_root(parent)
    except UsageError as error:
        _warn_of_parent(str(error))
        return None
    directory = parent / f"headway-{os.geteuid()}"
    try:
        files.make_dir(directory)
    except FileExistsError:
        pass
    except OSError:  # no such parent, or read-only: kernels are cached where torch would
        return None
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return directory
    _warn_of_foreign(directory, stat.filemode(found.st_mode), found.st_uid)
    return None


@cache  # logs once, and not for every rank and round
def _warn_of_parent(why: str) -> None:
    logger.warning("compiled kernels are cached where torch does, which is slower to start: %s", why)


@cache
def _warn_of_foreign(directory: Path, mode: str, uid: int) -> None:
    logger.warning(
        "%s has mode %s and belongs to %s; it is not used, since files in it would be executed: compiled kernels are "
        "cached where torch does; remove it, or set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR",
        directory,
        mode,
        ownership.user(uid),
    )
