"""The same script under every launcher: the same ranks, the same sum."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .bench import OPEN_MPI, Cluster

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parents[1] / "scripts"
WHO = [sys.executable, str(SCRIPTS / "who.py"), "--hosts"]
MPICH = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2"]
LINE = re.compile(
    r"^(\w+) rank (\d+)/(\d+) local (\d+)/(\d+) node (\d+)/(\d+) sum (\d+) (\S+)$", re.MULTILINE
)


def ranks(text: str) -> list[tuple[str, int, int, int, int, int]]:
    """(launcher, rank, local rank, ranks on the node, node, sum) of each rank; sizes and hosts are checked."""
    found = sorted(
        (launcher, int(rank), int(local), int(local_size), int(node), int(total), int(size), int(nodes), host)
        for launcher, rank, size, local, local_size, node, nodes, total, host in LINE.findall(text)
    )
    assert found, text
    assert {line[6] for line in found} == {len(found)}, text
    hosts = {line[4]: line[8] for line in found}
    assert all(hosts[line[4]] == line[8] for line in found), "ranks of one node are on one host"
    assert {line[7] for line in found} == {len(hosts)}, "as many nodes as hosts"
    return [line[:6] for line in found]


def expected(
    launcher: str, places: Sequence[tuple[int, int, int]]
) -> list[tuple[str, int, int, int, int, int]]:
    """What `ranks` finds when rank i is at (local rank, ranks on the node, node)."""
    total = sum(range(1, len(places) + 1))
    return [(launcher, rank, *place, total) for rank, place in enumerate(places)]


TWO_BY_TWO = [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]
ONE_EACH = [(0, 1, 0), (0, 1, 1)]
FAILURES = [("raise", 3), ("kill9", 0), ("exit0", 3)]  # a rank takes seconds to import torch
if os.environ.get("HEADWAY_FAULTS") == "full":
    FAILURES = [(how, rank) for rank in (3, 0) for how in ("raise", "kill9", "exit0")]


@pytest.mark.parametrize(
    ("options", "places"),
    [
        pytest.param(["-N2", "-n4"], [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)], id="three and one"),
        pytest.param(
            ["-N2", "--ntasks-per-node=2", "-m", "cyclic", "--gpus-per-task=1"],
            [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)],
            id="cyclic, a GPU each",
        ),
        pytest.param(["-N1", "-n1"], [(0, 1, 0)], id="one task"),
    ],
)
def test_srun(cluster: Cluster, options: list[str], places: list[tuple[int, int, int]]) -> None:
    done = cluster.srun(*options, *WHO, check=True)
    assert ranks(done.stdout) == expected("srun", places)
    assert "launched by: srun" in done.stderr
    assert not (cluster.work / "runs").exists(), "the meeting point is removed when all have come"


def test_srun_on_a_later_node_of_the_allocation(cluster: Cluster) -> None:
    script = f"srun -N1 -n2 -w n2 {' '.join(WHO)}"
    job = cluster.sbatch(script, "-N2", "--nodelist=n[1-2]", "--ntasks-per-node=2")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert ranks(cluster.output(job)) == expected("srun", [(0, 2, 0), (1, 2, 0)])
    assert " n2" in cluster.output(job)


def test_two_steps_of_one_job_at_once_do_not_meet(cluster: Cluster) -> None:
    step = f"srun -N1 -n2 --exact --overlap {' '.join(WHO)}"
    job = cluster.sbatch(f"{step} > first.txt & {step} > second.txt; wait", "-N2", "--ntasks-per-node=2")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    for name in ("first.txt", "second.txt"):
        assert ranks((cluster.work / name).read_text()) == expected("srun", [(0, 2, 0), (1, 2, 0)])


def test_srun_with_pmix(cluster: Cluster) -> None:
    done = cluster.srun("--mpi=pmix", "-N2", "--ntasks-per-node=2", *WHO, check=True)
    assert ranks(done.stdout) == expected("srun", TWO_BY_TWO)


def test_srun_with_pmi2(cluster: Cluster) -> None:
    """As on sites with MpiDefault=pmi2, where srun sets the variables of MPICH, too."""
    code = (
        "import os; from headway.dist.environment import detect; d = detect(); "
        "print('PMI_RANK' in os.environ, d.launcher, d.rank, d.world_size, d.local_rank, d.local_world_size)"
    )
    done = cluster.srun("--mpi=pmi2", "-N2", "--ntasks-per-node=2", sys.executable, "-c", code, check=True)
    assert sorted(done.stdout.splitlines()) == [f"True srun {rank} 4 {rank % 2} 2" for rank in range(4)]


def test_the_users_own_master_address_is_honoured(cluster: Cluster) -> None:
    script = "export MASTER_ADDR=n1 MASTER_PORT=29555"
    job = cluster.sbatch(f"{script}\nsrun {' '.join(WHO)}", "--nodelist=n[1-2]", "--ntasks-per-node=1")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert ranks(cluster.output(job)) == expected("srun", ONE_EACH)


def test_a_batch_script_is_one_process(cluster: Cluster) -> None:
    job = cluster.sbatch(" ".join(WHO), "-N2", "--ntasks-per-node=2")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert ranks(cluster.output(job)) == expected("none", [(0, 1, 0)])


def test_a_shell_in_an_allocation_is_one_process(cluster: Cluster) -> None:
    done = cluster.run(["salloc", "-N2", "--ntasks-per-node=2", *WHO], check=True)
    assert ranks(done.stdout) == expected("none", [(0, 1, 0)])


def test_mpirun(cluster: Cluster) -> None:
    done = cluster.run([*OPEN_MPI, "-n", "2", *WHO], check=True)
    assert ranks(done.stdout) == expected("mpi", [(0, 2, 0), (1, 2, 0)])


def test_mpirun_across_nodes_inside_a_batch_job(cluster: Cluster) -> None:
    command = f"{' '.join(OPEN_MPI)} -n 4 --map-by ppr:2:node {' '.join(WHO)}"
    job = cluster.sbatch(command, "-N2", "--ntasks-per-node=2")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert ranks(cluster.output(job)) == expected("mpi", TWO_BY_TWO)


def test_mpich(cluster: Cluster) -> None:
    done = cluster.run([*MPICH, *WHO], check=True)
    assert ranks(done.stdout) == expected("mpi", [(0, 2, 0), (1, 2, 0)])


def test_torchrun_on_two_nodes(cluster: Cluster) -> None:
    torchrun = (
        f"{Path(sys.executable).with_name('torchrun')} --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
    )
    command = f"srun --ntasks-per-node=1 {torchrun} --rdzv-id=7 --rdzv-endpoint=n1:29501 {' '.join(WHO[1:])}"
    job = cluster.sbatch(command, "--nodelist=n[1-2]")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    found = ranks(cluster.output(job))
    assert [line[0] for line in found] == ["torchrun"] * 2
    assert sorted(line[2:5] for line in found) == ONE_EACH


@pytest.mark.parametrize(("how", "rank"), FAILURES)
def test_one_rank_fails_and_all_are_down(cluster: Cluster, how: str, rank: int) -> None:
    """srun itself would wait for ever for the ranks that are left."""
    done = cluster.srun(
        "-N2",
        "--ntasks-per-node=2",
        *WHO[:1],
        SCRIPTS / "fail.py",
        env={"FAIL": how, "FAIL_RANK": str(rank)},
    )
    assert done.returncode in ({"kill9": 137}.get(how, 1), 1), done.stderr
    host = "n2" if rank == 3 else "n1"
    assert f"rank {rank} of 4 on {host}" in done.stderr
    assert ("ValueError: the third step is cursed" in done.stderr) == (how == "raise")
    assert done.stderr.count("Traceback") == (1 if how == "raise" else 0)
