"""Whatever ends a job before its time, it comes back by itself and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headway.run import Run
from headway.run.status import status
from headway.schedulers.base import Queue

from .bench import Cluster
from .jobs import HEADWAY, SCRIPTS, Result, Submitted, local_result, submit
from .test_submit import STOPS, project

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FIT = SCRIPTS / "fit.py"
TWO_NODES = ("--nodes", "2", "--ntasks-per-node", "1")
DEAF = """
import os, signal, time
for number in (signal.SIGUSR2, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
while "SLURM_RESTART_COUNT" not in os.environ: time.sleep(0.05)
"""
FULL = os.environ.get("HEADWAY_FAULTS") == "full"


@pytest.fixture(scope="session")  # of a module it would be made again for each kind of cluster
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What two ranks give when nothing happens."""
    result = local_result(tmp_path_factory.mktemp("local"), FIT, nproc=2)
    assert len(result[0]) == 48
    return result


@pytest.fixture(params=["cgroup_cluster", *(["cluster"] if FULL else [])])
def one_cluster(request: pytest.FixtureRequest) -> Cluster:
    """For what takes long and does not depend on who gets a signal: both kinds only with HEADWAY_FAULTS=full."""
    cluster: Cluster = request.getfixturevalue(request.param)
    return cluster


def preempt(job: Submitted) -> None:
    """Another job, of a partition with a higher priority, wants all nodes."""
    high = job.cluster.sbatch("hostname", "-N4", "--exclusive", "-p", "high")
    assert job.cluster.wait(high, timeout=250) == "COMPLETED"


def test_preempted_then_requeued(any_cluster: Cluster, undisturbed: Result) -> None:
    (job,) = submit(any_cluster, FIT, "0.3,0.3", options=TWO_NODES)
    job.until_step(6)
    preempt(job)
    before = job.steps()
    job.until(lambda: job.steps() >= before + 3, "the second attempt")
    first = job.log
    any_cluster.run(["scontrol", "requeue", str(job.job)])
    assert job.wait() == "COMPLETED", job.log
    assert job.result() == undisturbed
    assert job.log.startswith(first), "what the earlier starts have printed is still there"
    assert job.attempts()[0][0] == "stopped"
    assert job.attempts()[-1][0] == "done"
    assert all(step > 0 for _, step in job.attempts()[1:]), "no attempt began anew"


def test_its_time_is_over_and_another_is_cancelled(one_cluster: Cluster, undisturbed: Result) -> None:
    """The limit is a minute, and SLURM looks every half: with this lead the ranks hear of it after 10 to 40 seconds.

    A `Pipeline` also looks at the clock itself; a plain script knows of its end by SLURM's signal alone.
    One that ignores it runs into its limit, where SLURM would end it for good. Meanwhile another job is cancelled: it
    saves and stays away.
    """
    cluster, a_minute = one_cluster, ("--time", "1", "--signal-lead", "20")
    (late,) = submit(cluster, FIT, "1.0", options=(*TWO_NODES, *a_minute))
    project(cluster, stops=STOPS, deaf=DEAF)
    (plain,) = submit(cluster, "stops.py", "1", options=a_minute)
    (deaf,) = submit(cluster, "deaf.py", options=a_minute)
    (job,) = submit(cluster, FIT, "0.3", options=TWO_NODES)
    job.until_step(7)
    cluster.run(["scontrol", "update", f"jobid={job.job}", "requeue=1"], check=True)
    cluster.cancel(job.job)
    assert job.wait("CANCELLED") == "CANCELLED"
    job.until(lambda: job.attempts()[0][0] == "stopped", "the checkpoint", timeout=60)
    assert cluster.restarts(job.job) == 0
    # the run is whole: the same script goes on with it, by hand
    again = ["sbatch", "--parsable", job.path / "job.sh"]
    number = int(cluster.run(again, env={"FIT_STARTS": "1"}, check=True).stdout)
    assert cluster.wait(number, timeout=250) == "COMPLETED"
    assert job.result() == undisturbed
    assert job.attempts()[1][1] >= 7

    assert late.wait() == "COMPLETED", late.log
    assert late.result() == undisturbed
    assert cluster.restarts(late.job) >= 1
    assert late.attempts()[0][0] == "stopped"

    for each in (plain, deaf):
        assert each.wait() == "COMPLETED", each.log
        assert cluster.restarts(each.job) == 1
    assert "the time limit of the job came before its ranks had stopped" in deaf.log


def test_nodes_are_lost(impatient_cluster: Cluster, undisturbed: Result, tmp_path: Path) -> None:
    """One node crashes; another loses its network, and its rank goes on until it finds that it was replaced."""
    cluster = impatient_cluster
    (crashed,) = submit(cluster, FIT, "0.3", options=(*TWO_NODES, "--exclusive"))
    (cut,) = submit(cluster, FIT, "1.0", options=("--exclusive",))
    for job in (crashed, cut):
        job.until_step(3)
    assert (nodes_of(crashed), nodes_of(cut)) == ("n[1-2]", "n3")
    cluster.node("n2").crash()
    cluster.node("n3").cut()
    alone = local_result(tmp_path, FIT, nproc=1)  # meanwhile
    crashed.until(lambda: cluster.restarts(crashed.job) == 1, "SLURM to see that a node is lost")
    cluster.node("n2").start()
    for job in (crashed, cut):
        assert job.wait() == "COMPLETED", job.log
    assert crashed.result() == undisturbed
    cut.until(
        lambda: not lives_on(cluster, "n3", "fit.py"), "the end of the rank that was cut off", timeout=40
    )
    cluster.node("n3").mend(timeout=120)
    cut.until(lambda: not lives_on(cluster, "n3", "slurmstepd"), "SLURM to hear of it from its node")
    assert cut.result() == alone
    assert [status for status, _ in crashed.attempts()] == ["failed", "done"], crashed.log
    assert [status for status, _ in cut.attempts()] == ["lost", "done"], "the replaced rank wrote nothing"
    for job in (crashed, cut):
        assert not (job.path / "failure.json").exists(), "what the old attempt says is not about the new one"
        assert status(Run.open(job.path), Queue()).state == "done", "nor how its job script ended"


def test_a_step_that_outlives_its_agents_is_ended(one_cluster: Cluster, undisturbed: Result) -> None:
    """srun waits for ever where the process is gone by which SLURM knows a task, and for a node that crashed and is
    back before SLURM misses it. That process also read what rank 0 prints."""
    cluster = one_cluster
    (orphan,) = submit(cluster, FIT, "0.3", options=(*TWO_NODES, "--exclusive"))
    (back,) = submit(cluster, FIT, "0.3", options=(*TWO_NODES, "--exclusive"))
    for job in (orphan, back):
        job.until_step(3)
    assert (nodes_of(orphan), nodes_of(back)) == ("n[1-2]", "n[3-4]")
    stepd = rf"slurmstepd: \[{orphan.job}\.0\]"  # and not that of the job's script
    assert cluster.node("n1").run("pkill", "-KILL", "-f", stepd).returncode == 0
    cluster.node("n4").crash()
    cluster.node("n4").start()
    held = f"SLURM job {back.job} still holds its nodes"
    rows: list[dict[str, str]] = []  # each look starts a process, and the minute in which it is so goes on
    back.until(lambda: rows.append(listed(back)) or held in rows[-1]["why"], "what headway runs says")
    assert rows[-1]["state"] == "running" and "attempt 1 is failed: rank 1" in rows[-1]["why"]
    assert orphan.wait() == "COMPLETED", orphan.log
    assert orphan.result() == undisturbed and orphan.attempts() == [("done", 0)]
    assert "the reader of the output is gone" in (orphan.path / "log" / "rank-00000.txt").read_text()
    assert back.wait(timeout=160) == "COMPLETED", back.log  # an agent that is missing has a minute
    assert back.result() == undisturbed and cluster.restarts(back.job) == 1
    assert [status for status, _ in back.attempts()] == ["failed", "done"]
    assert "the agent on n4 left no record" in back.log, back.log


def listed(job: Submitted) -> dict[str, str]:
    """The run as `headway runs` lists it."""
    done = job.cluster.run([HEADWAY, "runs", "--json", "--root", job.path.parent], check=True)
    (row,) = [row for row in json.loads(done.stdout) if row["id"] == job.path.name]
    return row  # type: ignore[no-any-return]


def nodes_of(job: Submitted) -> str:
    return job.cluster.run(["squeue", "-h", "-j", str(job.job), "-o", "%N"], check=True).stdout.strip()


def lives_on(cluster: Cluster, node: str, name: str) -> bool:
    """Whether a process of that name lives on the node."""
    return cluster.node(node).run("pgrep", "-f", name).returncode == 0
