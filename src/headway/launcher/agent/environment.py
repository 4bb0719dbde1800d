"""What a rank finds around it: torchrun's variables, its share of the CPUs, a place for compiled kernels."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

from headway.system import files
from headway.system.limits import usable_cpus


@final
@dataclass(frozen=True, kw_only=True)
class Seating:
    """Where the ranks of one agent sit among all."""

    first_rank: int
    processes: int
    world_size: int
    first_local_rank: int
    """not 0 where several agents share a node, as under `mpirun -n 4 headway agent`"""
    local_world_size: int
    node: int
    nodes: int
    master: str
    port: int


def rank_environment(seating: Seating, index: int, around: Mapping[str, str]) -> dict[str, str]:
    """What one rank is told in torchrun's names; `index` counts the ranks of this agent."""
    told = {
        "RANK": seating.first_rank + index,
        "WORLD_SIZE": seating.world_size,
        "LOCAL_RANK": seating.first_local_rank + index,
        "LOCAL_WORLD_SIZE": seating.local_world_size,
        "GROUP_RANK": seating.node,
        "GROUP_WORLD_SIZE": seating.nodes,
        "MASTER_ADDR": seating.master,
        "MASTER_PORT": seating.port,
        # ranks that share the cores must not each start a thread per core
        "OMP_NUM_THREADS": around.get("OMP_NUM_THREADS", max(1, cores(around) // seating.local_world_size)),
    }
    return {name: str(value) for name, value in told.items()}


def cores(around: Mapping[str, str]) -> int:
    """The cores that the ranks of this node share: SLURM may have given us fewer than the kernel lets us use."""
    allowed = usable_cpus()
    given = around.get("SLURM_CPUS_PER_TASK") or around.get("SLURM_CPUS_ON_NODE") or ""
    given = given if "SLURM_STEP_ID" in around else ""
    return min(allowed, int(given)) if given.isdecimal() and int(given) else allowed


def cpu_shares(processes: int, around: Mapping[str, str]) -> list[set[int]] | None:
    """The CPUs of each rank, neighbours first; None where it is not ours to say.

    Under srun the agent's CPUs are the job's, and nobody else divides them. mpirun binds by itself, and on a machine
    without a scheduler others work, too.
    """
    if "SLURM_STEP_ID" not in around or "sched_getaffinity" not in vars(os):
        return None
    ours = sorted(os.sched_getaffinity(0), key=_place_of)
    return shares(ours, processes)


def shares(cpus: Sequence[int], processes: int) -> list[set[int]] | None:
    """Equal parts of a list; what does not divide is left to the first ones.

    >>> shares([0, 1, 2, 3, 4], 2)
    [{0, 1, 2}, {3, 4}]
    """
    if processes < 2 or len(cpus) < processes:
        return None
    size, larger = divmod(len(cpus), processes)
    ends = [index * size + min(index, larger) for index in range(processes + 1)]
    return [set(cpus[begin:end]) for begin, end in pairwise(ends)]


def _place_of(cpu: int) -> tuple[int, int, int]:
    """Socket, core, number: threads of one core, and cores of one socket, lie side by side."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), cpu
    except (OSError, ValueError):
        return 0, cpu, cpu


def kernel_caches(local_rank: int, around: Mapping[str, str]) -> dict[str, str]:
    """Where a rank keeps compiled kernels: on the node's own disk, apart from the other ranks, kept for the next job.

    Homes are network file systems, where thousands of small files are slow and ranks get into each other's way.
    """
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    wanted = {name: kind for name, kind in names.items() if name not in around}
    if not wanted:
        return {}
    root = private_folder(Path(around.get("SLURM_TMPDIR") or tempfile.gettempdir()))
    if root is None:
        return {}
    return {name: str(root / f"{kind}-{local_rank}") for name, kind in wanted.items()}


def private_folder(parent: Path) -> Path | None:
    """A folder that is ours alone, or None: what lies in it is executed, and others may write to /tmp."""
    folder = parent / f"headway-{os.geteuid()}"
    try:
        files.make_dir(folder)
    except FileExistsError:
        pass
    except OSError:  # no such parent, or read-only: kernels are cached where torch would
        return None
    found = folder.lstat()
    safe = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if safe else None
