"""Starts of a job on a real SLURM: on as many nodes as there are, by hand, again, with tries and time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .bench import Cluster
from .jobs import HEADWAY, Submitted, submit
from .test_submit import STOPS, project

SIZES = STOPS.replace(
    'print(f"start {again}"', 'print(f"start {again} of " + os.environ["WORLD_SIZE"]'
).replace("int(sys.argv[1])", "1")

pytestmark = pytest.mark.cluster


def listed(cluster: Cluster, job: Submitted) -> dict[str, Any]:
    """What `headway runs` says of a job."""
    done = cluster.run([HEADWAY, "runs", "--json", "--root", str(job.path.parent)], check=True)
    (found,) = [row for row in json.loads(done.stdout) if row["path"] == str(job.path)]
    return dict(found)


def test_a_range_of_nodes_is_as_many_as_are_free(cluster: Cluster) -> None:
    """In each start anew: the world follows, and what a job with fewer nodes leaves is read as a whole."""
    project(cluster, sizes=SIZES)
    (job,) = submit(cluster, "sizes.py", options=("--nodes", "1-2", "--ntasks-per-node", "2"))
    job.until(lambda: job.log.count("start 0 of 4") == 4, "four ranks on two nodes")
    for name in ("n2", "n3", "n4"):  # its second node, and those that could take its place
        cluster.run(["scontrol", "update", f"nodename={name}", "state=drain", "reason=test"], check=True)
    cluster.cancel(job.job, "--signal=USR2")
    assert job.wait() == "COMPLETED", job.log
    assert job.log.count("start 1 of 2") == 2 and "recorded how they ended" not in job.log
    found = listed(cluster, job)
    assert (found["state"], found["attempts"]) == ("done", 2) and found["seconds"] > 0


SHARED = """
import headway as hw
world = hw.init(device="cpu")
loader = hw.data.DataLoader(range(64), global_batch_size=16)
print("shared by", world.world_size, len(next(iter(loader))), flush=True)
"""


def test_a_range_of_nodes_is_the_largest_number_that_can_share_a_batch(cluster: Cluster) -> None:
    """Seen red: 16 samples, three free nodes of four, and the job failed."""
    project(cluster, shared=SHARED)
    cluster.run(["scontrol", "update", "nodename=n4", "state=drain", "reason=test"], check=True)
    (job,) = submit(cluster, "shared.py", options=("--nodes", "1-4"))
    assert job.wait() == "COMPLETED", job.log
    assert job.log.count("shared by 2 8") == 2, job.log
    assert "global_batch_size=16 cannot be split into 3 equal parts: 2 of the 3 nodes are used" in job.log


def test_a_script_that_is_submitted_by_hand_is_the_job_of_its_run(cluster: Cluster) -> None:
    """Here it is that of a run of an array, which SLURM has started by another script."""
    folder = project(cluster, stops=STOPS)
    (job,) = submit(cluster, "stops.py", "{starts}", options=("--no-requeue", "--array", "starts=1"))
    job.until(lambda: "start 0" in job.log, "the start")
    cluster.cancel(job.job, "--signal=USR2")
    assert job.wait("FAILED") == "FAILED"
    first = listed(cluster, job)
    assert (first["state"], first["attempts"]) == ("stopped", 1) and first["seconds"] > 0
    done = cluster.run(
        ["sbatch", "--parsable", "--export=ALL,HEADWAY_EARLIER_STARTS=1", str(job.path / "job.sh")],
        cwd=folder,
        check=True,
    )
    number = int(done.stdout)
    assert cluster.wait(number) == "COMPLETED", job.log
    assert "start 1" in job.log, "its output is where that of the first one is"
    assert (folder / f"slurm-{number}.out").read_text() == f"the output goes to {job.path}/log/job.txt\n"
    second = listed(cluster, job)
    assert (second["state"], second["job"], second["attempts"]) == ("done", str(number), 2)
    assert second["seconds"] > first["seconds"]
    assert json.loads((job.path / "submitted.json").read_text())["before"] == [f"{job.job}_0"]
