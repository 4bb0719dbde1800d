"""The bench itself: is the cluster as real as the other tests believe, and does it leave nothing behind?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from . import bench
from .bench import HERE, MPICH, OPEN_MPI, Cluster, run, why_not

pytestmark = pytest.mark.cluster

LONG = f"1000.{os.getpid()}"  # seconds to sleep, by which this suite knows its own sleepers

REACH = """
import os, socket, sys, time
if os.environ["SLURM_PROCID"] == "0":
    servers = [socket.create_server((host, 0)) for host in ("127.0.0.1", "n1")]
    with open("ports.new", "w") as file:
        print(*(server.getsockname()[1] for server in servers), file=file)
    os.rename("ports.new", "ports")
    while os.path.exists("ports"):
        time.sleep(0.02)
else:
    while not os.path.exists("ports"):
        time.sleep(0.02)
    for host, port in zip(("127.0.0.1", "n1"), open("ports").read().split()):
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            print(host, "reached")
        except ConnectionRefusedError:
            print(host, "refused")
    os.remove("ports")
"""

# The leader of the task and a process below it, in a session of its own, each note the signal they get.
LISTEN = """
listen() { trap "touch heard-$1" USR1; touch ready-$1; while :; do sleep 0.05; done; }
export -f listen
setsid bash -c "listen child" &
listen leader
"""


def until(true: Callable[[], object]) -> None:
    wait_until(true, "the condition holds")


def processes_naming(text: str) -> list[psutil.Process]:
    """All processes, zombies apart, that have the text in their environment or arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if text in "\0".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def reap() -> None:
    with bench._registry():
        bench._reap()


def assert_nothing_left(lab: Path, port: int) -> None:
    assert not lab.exists()
    assert processes_naming(f"{lab}/") == []
    assert f"hw{port}" not in run(["ip", "netns"]).stdout
    assert f"hw{port}" not in run(["ip", "-brief", "link"]).stdout
    assert str(lab) not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"freezer/hw{port}*"))


# --- what a node is


def test_every_node_has_its_own_name_processes_and_network(any_cluster: Cluster) -> None:
    command = "echo $(hostname) $(readlink /proc/self/ns/pid /proc/self/ns/net /proc/self/ns/ipc)"
    lines = any_cluster.srun("-N4", "sh", "-c", command, check=True).stdout.splitlines()
    names, *spaces = zip(*(line.split() for line in lines), strict=True)
    assert sorted(names) == ["n1", "n2", "n3", "n4"]
    for space in spaces:
        assert len(set(space)) == 4


def test_nodes_share_files_but_not_memory(cluster: Cluster) -> None:
    cluster.srun("-w", "n1", "touch", "/dev/shm/mine", "ours", check=True)
    assert cluster.srun("-w", "n1", "ls", "/dev/shm/mine", "ours").returncode == 0
    elsewhere = cluster.srun("-w", "n2", "ls", "/dev/shm/mine", "ours")
    assert (elsewhere.stdout, elsewhere.returncode) == ("ours\n", 2)


def test_localhost_of_one_node_is_not_that_of_another(cluster: Cluster) -> None:
    result = cluster.srun("-w", "n[1-2]", "-n2", sys.executable, "-c", REACH, check=True)
    assert result.stdout.splitlines() == ["127.0.0.1 refused", "n1 reached"]


def test_a_task_sees_the_fake_gpu_that_it_was_given(cluster: Cluster) -> None:
    show = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    each = cluster.srun("-N1", "-n2", "--gpus-per-task=1", *show, check=True).stdout
    assert sorted(each.split()) == ["0", "1"]
    assert cluster.srun("-N1", "-n2", "--gres=gpu:2", *show, check=True).stdout.split() == ["0,1", "0,1"]
    assert "not available" in cluster.srun("-N1", "--gres=gpu:3", *show).stderr


# --- what happens to jobs


def test_a_batch_job_runs_and_its_output_can_be_read(cluster: Cluster) -> None:
    job = cluster.sbatch('srun sh -c "echo task $SLURM_PROCID"; echo done', "-N2")
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.output(job).splitlines()[-1] == "done"
    failing = cluster.sbatch("echo no; exit 3")
    assert cluster.wait(failing) == "FAILED"
    with pytest.raises(AssertionError, match=r"is FAILED, not RUNNING; its output:\nno"):
        cluster.wait(failing, "RUNNING")


def test_preemption_by_the_high_partition_requeues_a_low_job(cluster: Cluster) -> None:
    low = cluster.sbatch("sleep 100", "-N4", "--exclusive")
    cluster.wait(low, "RUNNING")
    cluster.run(["scontrol", "update", "partition=low", "gracetime=0"], check=True)
    try:
        high = cluster.sbatch("hostname", "-N4", "--exclusive", "-p", "high")
        assert cluster.wait(high) == "COMPLETED"
    finally:
        cluster.run(["scontrol", "update", "partition=low", "gracetime=5"], check=True)
    assert cluster.state(low) == "PENDING"
    assert cluster.restarts(low) == 1


def test_a_job_on_a_lost_node_starts_again_elsewhere(cluster: Cluster) -> None:
    job = cluster.sbatch('echo "run ${SLURM_RESTART_COUNT:-0} on $(hostname)"; sleep 100')
    until(lambda: "run 0 on n1\n" in cluster.output(job))
    cluster.node("n1").down()
    until(lambda: "run 1 on n2\n" in cluster.output(job))
    cluster.node("n1").up()
    assert cluster.srun("-w", "n1", "true").returncode == 0


def test_signals_reach_every_process_or_only_task_leaders(any_cluster: Cluster, tmp_path: Path) -> None:
    job = any_cluster.sbatch(f"cd {tmp_path}; exec srun bash -c '{LISTEN}'")
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    any_cluster.cancel(job, "--signal=USR1")
    until(lambda: (tmp_path / "heard-leader").exists())
    if any_cluster.proctrack == "linuxproc":
        until(lambda: (tmp_path / "heard-child").exists())
    else:
        time.sleep(0.5)
        assert not (tmp_path / "heard-child").exists()


# --- what happens to nodes


def test_a_node_crashes_and_comes_back(cluster: Cluster) -> None:
    node = cluster.node("n3")
    cluster.srun("-w", "n3", "touch", "/dev/shm/lost", check=True)
    job = cluster.sbatch(f"sleep {LONG}", "-w", "n3")
    cluster.wait(job, "RUNNING")
    until(lambda: node.run("pgrep", "-f", f"sleep {LONG}").returncode == 0)
    node.crash()
    assert processes_naming(f"sleep\0{LONG}") == []
    cluster.cancel(job)
    node.start()
    assert cluster.srun("-w", "n3", "ls", "-A", "/dev/shm", check=True).stdout == ""


def test_a_node_is_cut_off_and_mended(cluster: Cluster) -> None:
    node = cluster.node("n2")
    connect = f"import socket; socket.create_connection(({node.address!r}, {node.port}), timeout=1)"
    from_n1 = ("-w", "n1", sys.executable, "-c", connect)
    assert cluster.srun(*from_n1).returncode == 0
    node.cut()
    assert cluster.srun(*from_n1).returncode != 0
    assert node.run("hostname").stdout == "n2\n", "a node that is cut off lives on"
    node.mend()
    assert cluster.srun("-N4", "true").returncode == 0


def test_reset_repairs_everything(cluster: Cluster) -> None:
    job = cluster.sbatch("srun sleep 100", "-N4")
    cluster.wait(job, "RUNNING")
    cluster.node("n1").crash()
    cluster.node("n2").cut()
    cluster.node("n3").down()
    cluster.reset()
    assert cluster.state(job) == "CANCELLED"
    assert list(cluster.work.iterdir()) == []
    assert len(cluster.srun("-N4", "hostname", check=True).stdout.split()) == 4
    cluster.node("n2").cut()  # alone: Slurm has not noticed it yet
    cluster.reset()
    assert cluster.srun("-w", "n2", "hostname", check=True).stdout == "n2\n"


# --- MPI


def test_open_mpi_on_this_machine_and_across_nodes(cluster: Cluster) -> None:
    here = cluster.run([*OPEN_MPI, "-n", "3", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK"], check=True).stdout
    assert sorted(here.split()) == ["0", "1", "2"]
    job = cluster.sbatch(
        f"{' '.join(OPEN_MPI)} sh -c 'echo $(hostname) $OMPI_COMM_WORLD_RANK'",
        "-w",
        "n[2-3]",
        "--ntasks-per-node=2",
    )
    assert cluster.wait(job) == "COMPLETED"
    assert sorted(cluster.output(job).splitlines()) == ["n2 0", "n2 1", "n3 2", "n3 3"]


def test_srun_starts_mpi_processes_through_pmix(cluster: Cluster) -> None:
    ranks = cluster.srun("--mpi=pmix", "-N2", "-n4", "sh", "-c", "echo $PMIX_RANK", check=True).stdout
    assert sorted(ranks.split()) == ["0", "1", "2", "3"]


def test_mpich_of_the_virtual_environment() -> None:
    assert sorted(run([*MPICH, "-n", "2", "sh", "-c", "echo $PMI_RANK"], check=True).stdout.split()) == [
        "0",
        "1",
    ]


# --- the bench keeps its promises


def test_a_command_that_hangs_is_killed_with_its_children(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ran out of time after 3 s.*begun"):
        cluster.run(["sh", "-c", f"echo begun; setsid sleep {LONG} & sleep {LONG}"], timeout=3)
    assert processes_naming(f"sleep\0{LONG}") == []


@pytest.mark.parametrize("mode", ["net", "ns", "plain"])
def test_down_leaves_nothing_behind(mode: str, request: pytest.FixtureRequest) -> None:
    neighbour: Cluster = request.getfixturevalue("cluster")
    proctrack = "linuxproc" if mode == "plain" or why_not("cgroup") else "cgroup"
    cluster = Cluster.up(nodes=2, mode=mode, proctrack=proctrack)
    assert cluster.port != neighbour.port
    try:
        job = cluster.sbatch("setsid sleep 100 & srun -N2 sleep 100", "-N2")
        cluster.wait(job, "RUNNING")
        assert len(processes_naming(f"{cluster.lab}/")) >= 4
    finally:
        with bench._registry():  # nobody else claims its ports before we have looked
            cluster.down()
            assert_nothing_left(cluster.lab, cluster.port)
    assert neighbour.srun("-N4", "true").returncode == 0


def test_what_a_killed_suite_left_is_cleaned_by_the_next(cluster: Cluster) -> None:
    suite = "import bench, time; it = bench.Cluster.up(nodes=1); print(it.lab, flush=True); time.sleep(100)"
    with subprocess.Popen(
        [sys.executable, "-c", suite], cwd=HERE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout
            lab = Path(other.stdout.readline().strip())
            reap()
            assert processes_naming(f"{lab}/"), "a living suite keeps its cluster"
            with bench._registry():  # whoever else starts a cluster would clean up, or claim its ports
                other.kill()
                other.wait()
                assert processes_naming(f"{lab}/"), "nobody has cleaned up yet"
                reap()
                assert_nothing_left(lab, int(lab.name))
        finally:
            other.kill()
    assert cluster.srun("true").returncode == 0


def test_without_root_a_user_namespace_does() -> None:
    with tempfile.TemporaryDirectory(
        prefix="hw-", dir="/tmp"
    ) as home:  # where an ordinary user may read and write
        lab = Path(home) / "lab"
        for script in HERE.glob("*.sh"):
            shutil.copy(script, home)
        command = [
            f"{home}/rootless.sh",
            "bash",
            "-c",
            "./up.sh && . $LAB/env.sh && srun -N2 hostname; ./down.sh",
        ]
        if os.getuid() == 0:
            shutil.chown(home, "daemon", "daemon")
            command = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups", *command]
        settings = {"LAB": str(lab), "NODES": "2", "MODE": "net", "PORT": "17000"}
        result = run(command, env={**os.environ, **settings}, cwd=Path(home), check=True)
        assert sorted(result.stdout.split("\n")[1:3]) == ["n1", "n2"], result.stdout + result.stderr
        assert not lab.exists()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("setting", "outcome"),
    [({}, "1 skipped"), ({"CI": "true"}, "1 error"), ({"HEADWAY_REQUIRE_CLUSTER": "1"}, "1 error")],
)
def test_without_slurm_tests_are_skipped_unless_they_must_run(setting: dict[str, str], outcome: str) -> None:
    one = f"{__file__}::test_nodes_share_files_but_not_memory"
    # not a worker of this suite, whose groups it would write anew
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = {**ours, "CI": "", "HEADWAY_REQUIRE_CLUSTER": "", "PATH": "/nowhere", **setting}
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", one]
    result = run(command, env=env, timeout=300)
    assert outcome in result.stdout
    assert "not installed: srun" in result.stdout
