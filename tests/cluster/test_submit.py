"""`headway submit` against a real SLURM: the code as it was, one job or many, clear words, nothing executed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from waiting import EXIT_LIMIT_S, check_duration, wait_until

from .bench import OPEN_MPI, Cluster
from .jobs import HEADWAY, SCRIPTS, local_result, submit
from .test_join import expected, ranks

pytestmark = pytest.mark.cluster

SHOW = """
import json, os, sys
rank = int(os.environ["RANK"])
facts = {"argv": sys.argv[1:], "env": os.environ.get("GREETING"), "size": os.environ["WORLD_SIZE"],
         "node": os.environ["SLURMD_NODENAME"], "run": os.environ["HEADWAY_RUN"]}
with open(os.path.join(os.environ["HEADWAY_RUN"], f"rank-{rank}.json"), "w") as file:
    json.dump(facts, file)
"""
STOPS = """
import os, signal, sys, time
stop = []
signal.signal(signal.SIGUSR2, lambda *_: stop.append(1))
again = int(os.environ.get("SLURM_RESTART_COUNT", 0)) + int(os.environ.get("HEADWAY_EARLIER_STARTS", 0))
print(f"start {again}", flush=True)
while again < int(sys.argv[1]) and not stop: time.sleep(0.05)
sys.exit(75 if stop else 0)
"""


def project(cluster: Cluster, **files: str) -> Path:
    folder = cluster.work / "project"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_two_nodes_give_what_one_machine_gives(cluster: Cluster, tmp_path: Path) -> None:
    (job,) = submit(cluster, SCRIPTS / "fit.py", options=("--nodes", "2", "--ntasks-per-node", "2"))
    assert job.wait() == "COMPLETED", job.log
    assert job.result() == local_result(tmp_path, SCRIPTS / "fit.py", nproc=4)
    assert "2 nodes x 2" in job.log


def test_a_sweep_of_four(cluster: Cluster) -> None:
    project(cluster, show=SHOW)
    jobs = submit(cluster, "show.py", "--fixed", options=("--array", "lr=1e-3,3e-4", "--array", "seed=1,2"))
    assert len({job.job for job in jobs}) == 1
    jobs[0].wait({"COMPLETED", "COMPLETED\nCOMPLETED\nCOMPLETED\nCOMPLETED"})
    given = [json.loads((job.path / "rank-0.json").read_text()) for job in jobs]
    assert [rank["argv"][1:] for rank in given] == [
        [f"--lr={lr}", f"--seed={seed}"] for lr in ("1e-3", "3e-4") for seed in (1, 2)
    ]
    assert [rank["run"] for rank in given] == [str(job.path) for job in jobs]
    assert all((job.path / "log" / "job.txt").exists() for job in jobs)


def test_the_job_runs_the_code_as_it_was_submitted(cluster: Cluster) -> None:
    folder = project(cluster, show=SHOW, helper="WORD = 'committed'")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / "show.py").write_text("import helper, os\nos.environ['GREETING'] = helper.WORD\n" + SHOW)
    (folder / "helper.py").write_text("WORD = 'dirty'")
    refused = cluster.run([HEADWAY, "submit", "--dirty", "refuse", "show.py"], cwd=folder)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert not (folder / "runs").exists()
    (job,) = submit(cluster, "show.py", options=("--extra", "hold"))
    (folder / "helper.py").write_text("WORD = 'edited after submission'")
    cluster.run(["scontrol", "release", str(job.job)], check=True)
    assert job.wait() == "COMPLETED", job.log
    assert json.loads((job.path / "rank-0.json").read_text())["env"] == "dirty"


def test_nothing_that_people_write_is_executed(cluster: Cluster) -> None:
    folder = project(cluster, show=SHOW)
    hostile = ["$(touch hit)", "; touch hit", "`touch hit`", "-x", "a\nb", "'\"\\", "%j", " "]
    greeting = 'it\'s "$HOME" $(touch hit); a  b\n#SBATCH --wrap=id'
    options = ("--nodes", "2", "--env", f"GREETING={greeting}", "--root", "runs $(touch hit); %j 'x'")
    (job,) = submit(cluster, "show.py", *hostile, options=options)
    assert job.wait() == "COMPLETED", job.log
    given = [json.loads((job.path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["argv"], rank["env"], rank["size"]) for rank in given] == [(hostile, greeting, "2")] * 2
    assert len({rank["node"] for rank in given}) == 2
    for name in ("a;touch hit", "$(touch hit)", "a\nb", "-x"):
        refused = cluster.run([HEADWAY, "submit", f"--name={name}", "show.py"], cwd=folder)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "run name" in refused.stderr
    assert not list(cluster.work.rglob("hit"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partition", "hihg"], ["there is no partition 'hihg'; did you mean 'high'?", "low"]),
        (["--nodes", "9"], ["no nodes here can serve 9 nodes", "4 nodes with 4 CPUs"]),
        (["--gpus-per-node", "3"], ["3 GPUs", "gpu:2"]),
        (["--time", "5:00:00"], ["time='5:00:00' is not allowed here", "low at most 1:00:00"]),
        (["--constraint", "nvlink"], ["no node has the features 'nvlink'"]),
        (["--mem", "9T"], ["9T of memory"]),
        (["--extra", "nonsense=1"], ["SLURM refuses the job", "nonsense"]),
    ],
)
def test_refusals_are_one_helpful_sentence_and_leave_nothing(
    cluster: Cluster, options: list[str], words: list[str]
) -> None:
    folder = project(cluster, show=SHOW)
    done = cluster.run([HEADWAY, "submit", *options, "show.py"], cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (folder / "runs").exists()
    assert not cluster.run(["squeue", "-h"]).stdout


def test_a_dry_run_shows_the_script_and_makes_nothing(cluster: Cluster) -> None:
    folder = project(cluster, show=SHOW)
    done = cluster.run([HEADWAY, "submit", "--dry-run", "--nodes", "2", "show.py"], cwd=folder, check=True)
    assert "#SBATCH --nodes=2" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["show.py"]


def test_the_output_can_be_watched_to_the_end(cluster: Cluster) -> None:
    folder = project(cluster, stops=STOPS)
    done = cluster.run([HEADWAY, "submit", "--watch", "stops.py", "0"], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nstart 0\n" in done.stdout
    assert done.stdout.rstrip().endswith("is done")
    (folder / "stops.py").write_text("raise SystemExit(3)")
    done = cluster.run([HEADWAY, "submit", "--watch", "stops.py"], cwd=folder)
    assert done.returncode == 1
    assert "exited with code 3" in done.stdout


def test_where_jobs_are_not_requeued_another_one_follows(cluster: Cluster) -> None:
    project(cluster, stops=STOPS)
    (job,) = submit(cluster, "stops.py", "1")
    job.until(lambda: "start 0" in job.log, "the start")
    cluster.run(["scontrol", "update", f"jobid={job.job}", "requeue=0"], check=True)
    cluster.cancel(job.job, "--signal=USR2")
    assert job.wait("FAILED") == "FAILED"  # 75: it has not done what it was for
    follower = json.loads((job.path / "submitted.json").read_text())
    assert follower["before"] == [str(job.job)]
    assert cluster.wait(int(follower["job_id"])) == "COMPLETED", job.log
    assert "start 1" in job.log


def test_requeues_have_an_end(cluster: Cluster) -> None:
    project(cluster, stops=STOPS)
    (job,) = submit(cluster, "stops.py", "9", options=("--max-requeues", "1"))
    for start in (0, 1):
        job.until(lambda start=start: f"start {start}" in job.log, f"start {start}")  # type: ignore[misc]
        cluster.cancel(job.job, "--signal=USR2")
    assert job.wait("FAILED") == "FAILED"
    assert "not queued again: it has been queued again 1 times, and max_requeues=1" in job.log
    assert cluster.restarts(job.job) == 1


def test_one_job_of_an_array_is_requeued_alone(cluster: Cluster) -> None:
    project(cluster, stops=STOPS)
    jobs = submit(cluster, "stops.py", "{starts}", options=("--array", "starts=0,1"))
    jobs[1].until(lambda: "start 0" in jobs[1].log, "the start")
    cluster.run(["scancel", "--signal=USR2", f"{jobs[1].job}_1"], check=True)
    jobs[1].until(lambda: "start 1" in jobs[1].log, "the second start")
    assert "start 1" not in jobs[0].log


# ---- failing


def test_the_last_lines_of_the_log_are_the_cause(cluster: Cluster) -> None:
    options = ("--nodes", "2", "--ntasks-per-node", "2", "--env", "FAIL=raise", "--env", "FAIL_RANK=3")
    (job,) = submit(cluster, SCRIPTS / "fail.py", options=options)
    assert job.wait() == "FAILED"
    block = job.log[job.log.rindex("headway: rank 3 of 4 on n2") :]
    assert "Traceback" in block
    assert "ValueError: the third step is cursed" in block
    assert "again" not in block


def test_an_agent_that_is_killed_ends_the_job_for_good(cluster: Cluster) -> None:
    """SLURM then ends the others by SIGTERM, as when a job is preempted; it is none. So does the kill of srun."""
    project(cluster, sleeps="import time\nprint('here', flush=True)\ntime.sleep(100)")
    (job,) = submit(cluster, "sleeps.py", options=("--nodes", "2"))
    (other,) = submit(cluster, "sleeps.py", options=("--nodes", "2"))
    for each in (job, other):
        each.until(lambda each=each: each.log.count("here") == 2, "both ranks")  # type: ignore[misc]
    cluster.node("n2").run("pkill", "-KILL", "-f", f"python.* headway agent --run {job.path}$")
    cluster.run(["pkill", "-KILL", "-f", f"^srun .* --run {other.path}$"], check=True)
    killed = "was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg), and"
    for each, cause in (
        (job, f"the agent on n2 {killed} its ranks with it"),
        (other, f"the process of the job's step (srun) {killed} the ranks were ended with it"),
    ):
        assert each.wait("FAILED") == "FAILED"
        assert f"headway: {cause}\nrecord: {each.path / 'failure.json'}\n" in each.log
        assert json.loads((each.path / "failure.json").read_text())["error"] == cause
    assert cluster.restarts(job.job) == 0
    assert cluster.node("n2").run("pgrep", "-f", "sleeps.py").returncode == 1


# ---- agents without a job script, and MPI


def test_agents_under_srun_may_bring_different_numbers_of_ranks(cluster: Cluster) -> None:
    agent = f"exec {HEADWAY} agent --nproc $((SLURM_NODEID + 1)) {SCRIPTS / 'who.py'} --hosts"
    done = cluster.srun("-N2", "--ntasks-per-node=1", "bash", "-c", agent, check=True)
    assert ranks(done.stdout) == expected("headway", [(0, 1, 0), (0, 2, 1), (1, 2, 1)])
    assert not list(cluster.work.glob("runs/.*")), "the agents' meeting point is removed"


def test_agents_under_mpirun(cluster: Cluster) -> None:
    script = SCRIPTS / "who.py"
    command = [
        *OPEN_MPI,
        "-n",
        "1",
        HEADWAY,
        "agent",
        "--nproc",
        "3",
        script,
        ":",
        "-n",
        "1",
        HEADWAY,
        "agent",
        script,
    ]
    done = cluster.run(command, check=True)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("headway rank"))
    assert lines == [f"headway rank {rank}/4 local {rank}/4 node 0/1 sum 10" for rank in range(4)]
    assert not list(cluster.work.glob("runs/.*")), "the agents' meeting point is removed"


def test_under_mpirun_all_go_down_with_one(cluster: Cluster) -> None:
    folder = project(
        cluster,
        dies="import os, time\nif os.environ['RANK'] == '2':\n    time.sleep(1)\n    print(f'{time.time()} died', "
        "flush=True)\n    os.abort()\ntime.sleep(100)",
    )
    command = [
        "bash",
        "-c",
        '"$@"; code=$?; date +"%s.%N down"; exit $code',
        "x",
        *OPEN_MPI,
        "-n",
        "4",
        HEADWAY,
        "agent",
        str(folder / "dies.py"),
    ]
    done = cluster.run(command, cwd=folder, timeout=180)
    times = {line.split()[1]: float(line.split()[0]) for line in done.stdout.splitlines()[-2:]}
    assert done.returncode != 0
    check_duration(times["down"] - times["died"], EXIT_LIMIT_S, "mpirun had ended after the rank died")
    assert "rank 2 of 4" in done.stderr
    assert "crashed in native code (SIGABRT)" in done.stderr
    find = ["pgrep", "-f", str(folder / "dies.py")]
    wait_until(
        lambda: subprocess.run(find, capture_output=True).returncode == 1,
        "none of its processes is left",
        timeout_s=EXIT_LIMIT_S,
    )
