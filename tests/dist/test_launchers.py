"""What each launcher tells its processes (the table was read off real ones; tests/cluster runs the real ones again)."""

from __future__ import annotations

import socket

import pytest

from headway.dist.environment import detect, first_host
from headway.errors import UsageError

SRUN_STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_SRUN_COMM_PORT": "4242",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "7",
    "PMIX_NAMESPACE": "prte-1@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "17.0", "PMI_FD": "12"}


def place(environ: dict[str, str]) -> tuple[str, int, int, int | None, int | None]:
    found = detect(environ)
    return found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size


def test_nothing_is_one_process() -> None:
    assert place({}) == ("none", 0, 1, 0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, id="batch script"),
        pytest.param(
            {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}, id="salloc shell"
        ),
    ],
)
def test_an_allocation_without_a_step_is_one_process(environ: dict[str, str]) -> None:
    assert place(environ) == ("none", 0, 1, 0, 1)


def test_a_step_of_srun() -> None:
    found = detect(SRUN_STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 0, 1)
    assert found.master == "n2", "the first host of the step, not of the job"
    assert found.node == "node 1"


def test_steps_have_different_names_and_restarts_too() -> None:
    names = {
        detect(SRUN_STEP | change).launch_id
        for change in (
            {},
            {"SLURM_STEP_ID": "1"},
            {"SLURM_RESTART_COUNT": "1"},
            {"SLURM_SRUN_COMM_PORT": "1"},
        )
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, ("torchrun", 5, 8, 1, 4), id="torchrun"),
        pytest.param(SRUN_STEP | TORCHRUN, ("torchrun", 5, 8, 1, 4), id="torchrun under srun"),
        pytest.param(OPEN_MPI, ("mpi", 2, 4, 0, 2), id="Open MPI"),
        pytest.param(
            SRUN_STEP | {"SLURM_PROCID": "0"} | OPEN_MPI, ("mpi", 2, 4, 0, 2), id="mpirun under SLURM"
        ),
        pytest.param(MPICH, ("mpi", 1, 2, 1, 2), id="MPICH"),
        pytest.param(TORCHRUN | {"HEADWAY_RENDEZVOUS": "/x"}, ("headway", 5, 8, 1, 4), id="headway"),
        pytest.param(SRUN_STEP | {"PMIX_RANK": "3"}, ("srun", 3, 4, 0, 1), id="srun --mpi=pmix"),
        pytest.param(SRUN_STEP | PMI2, ("srun", 3, 4, 0, 1), id="srun --mpi=pmi2"),
        pytest.param(SRUN_STEP | MPICH, ("mpi", 1, 2, 1, 2), id="mpiexec in a step of srun"),
        pytest.param(
            SRUN_STEP | PMI2 | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            ("mpi", 3, 4, 0, 1),
            id="mpiexec in a step of srun, with the same numbers",
        ),
        pytest.param(PMI2, ("mpi", 3, 4, None, None), id="another launcher of MPI"),
    ],
)
def test_the_innermost_launcher_counts(
    environ: dict[str, str], expected: tuple[str, int, int, int | None, int | None]
) -> None:
    assert place(environ) == expected


def test_where_ranks_meet() -> None:
    assert detect(TORCHRUN).store_address == "n1:29500"
    assert detect(TORCHRUN | {"HEADWAY_RENDEZVOUS": "/x"}).store_address is None
    assert detect(OPEN_MPI).store_address is None
    assert detect(OPEN_MPI | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}).store_address == "h:1"
    assert detect(MPICH | {"PMI_SIZE": "8"}).launch_id is None, "across nodes MPICH gives no common name"
    assert detect(MPICH).node == socket.gethostname()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "RANK=2 is not a rank of WORLD_SIZE=2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT are not: start the script with torchrun",
        ),
        (TORCHRUN | {"MASTER_PORT": "29500x"}, "MASTER_PORT='29500x' is not a port"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "give a number from 1 to 65535"),
        (SRUN_STEP | {"SLURM_STEP_TASKS_PER_NODE": "3;1"}, "expected a form like '2\\(x3\\),1'"),
    ],
)
def test_a_broken_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect(environ)


def test_tasks_per_node_in_slurms_shorthand() -> None:
    def local_size(node: int) -> int | None:
        environ = SRUN_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": str(node)}
        return detect(environ).local_world_size

    assert [local_size(node) for node in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("cn-l[084-085,090],gpu[1-3]", "cn-l084"),
        ("n[9-11]", "n9"),
        ("n[090,084]", "n090"),
        ("r[1-2]n[01-02]-ib,r7", "r1n01-ib"),
        ("10.0.0.[1-2]", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_step(hostlist: str, first: str) -> None:
    assert first_host(hostlist) == first
