"""`headway doctor --nodes` and `headway submit --doctor` on a real SLURM: nodes pass, or the script does not start."""

from __future__ import annotations

import json
import os

import pytest

from .bench import Cluster
from .jobs import HEADWAY, submit

pytestmark = pytest.mark.cluster


def test_two_nodes_are_examined_by_a_job_of_its_own(cluster: Cluster) -> None:
    command = [HEADWAY, "doctor", "--nodes", "2", "--json", "--data", str(cluster.work / "nowhere")]
    done = cluster.run(command, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout, done.stderr
    facts = json.loads(done.stdout)
    assert [node["host"] for node in facts["nodes"]] == ["n1", "n2"]
    lines = {check["name"]: check for check in facts["checks"]}
    assert lines["clocks"]["detail"].startswith("2 nodes agree within ")
    assert "rank" in lines["interconnect"]["detail"] and lines["versions"]["verdict"] == "ok"
    assert len(facts["interconnect"]["links"]) == 2
    assert [name for name, check in lines.items() if check["verdict"] == "bad"] == ["data read"]
    assert lines["data read"]["detail"].startswith("n1: No such file or directory")


@pytest.mark.skipif(os.environ.get("HEADWAY_FAULTS") != "full", reason="two more jobs: make faults")
def test_a_script_starts_only_on_nodes_that_pass(cluster: Cluster) -> None:
    folder = cluster.work / "project"
    folder.mkdir()
    (folder / "hello.py").write_text("print('the script has started', flush=True)")
    data = folder / "data.bin"  # there for the submission, and gone when the job starts
    data.write_bytes(bytes(1 << 20))
    options = ("--nodes", "2", "--doctor", "--pre", str(data), "--pre-to", "/tmp", "--extra", "hold")
    (job,) = submit(cluster, "hello.py", options=options)
    data.unlink()
    cluster.run(["scontrol", "release", str(job.job)], check=True)
    assert job.wait() == "FAILED"
    assert "bad   data read     n1: No such file or directory" in job.log
    assert "the script was not started: the nodes fail these checks: data read" in job.log
    assert "the script has started" not in job.log
    assert json.loads((job.path / "ended.json").read_bytes())["exit_code"] == 1
    (job,) = submit(cluster, "hello.py", options=("--nodes", "2", "--doctor"))
    assert job.wait() == "COMPLETED", job.log
    assert job.log.index("ok    versions") < job.log.index("the script has started")
