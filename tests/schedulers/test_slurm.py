"""SLURM's answers in sentences, by a client that answers as SLURM's programs do. SLURM itself is in tests/cluster."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from headway import schedulers
from headway.errors import HeadwayError, SchedulerUnreachable, UsageError
from headway.launcher.targets import Slurm
from headway.schedulers.base import JobIds, JobRequest, JobStatus, Queue
from headway.schedulers.slurm.client import SlurmAnswer, SlurmClient
from headway.schedulers.slurm.refusals import refusal
from headway.schedulers.slurm.scheduler import SlurmScheduler


class Client:
    """Lets SLURM's programs answer with these codes, outputs and errors, one after the other; the last one stays."""

    def __init__(self, *answers: tuple[int, str, str]) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._answers = list(answers)

    def run(self, *command: str, **_: Any) -> SlurmAnswer:
        self.asked.append(command)
        code, out, err = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return SlurmAnswer(code=code, out=out, err=err)


def scheduler(*answers: tuple[int, str, str]) -> tuple[SlurmScheduler, Client]:
    client = Client(*answers)
    return SlurmScheduler(cast(SlurmClient, client)), client


def request(**settings: Any) -> JobRequest:
    return Slurm(**settings).request(name="x", directory=Path("/run"), log=Path("log/job.txt"))


def job(number: str) -> JobIds:
    job_id, _, task = number.partition("_")
    return JobIds(scheduler="slurm", job_id=job_id, array_job_id=job_id, array_task_id=task or None)


BUSY = (1, "", "slurm_requeue error: Unable to contact slurm controller (connect failure)")
NEVER = (1, "", "Requested operation is presently disabled for job 7")


def test_sbatch_does_not_see_the_job_from_which_it_is_called() -> None:
    around = {
        "PATH": "/usr/bin:/bin",
        "A": "b",
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "9",
        "SRUN_DEBUG": "3",
        "HEADWAY_RUN": "/runs/x",
        "HEADWAY_STAGED": "/scratch/of/that/node",
        "HEADWAY_EARLIER_STARTS": "3",
    }
    kept = {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "big", "SBATCH_ACCOUNT": "lab", "HEADWAY_RUNS": "/runs"}
    seen = SlurmClient(around | kept).run("env").lines
    assert {line for line in seen if line.startswith(("A=", "S", "HEADWAY_"))} == {
        "A=b",
        *(f"{name}={value}" for name, value in kept.items()),
    }


@pytest.mark.parametrize(
    ("limits", "partition", "time", "refused"),
    [
        ("cpu 2:00:00\ngpu* 1:00:00", None, "1:00:01", True),
        ("cpu 2:00:00\ngpu* 1:00:00", None, "1:00:00", False),
        ("cpu 2:00:00\ngpu 1:00:00", "cpu,gpu", "2:00:00", False),
        ("cpu 2:00:00\ngpu infinite", "cpu,gpu", "9-0", False),
        ("", "gpu", "9-0", False),
        ("Welcome to Big\nhave fun\ncpu* 1:00:00\ngpu 9-00:00:00", None, "1:00:01", True),
        ("Welcome to Big\nhave fun\ngpu 1:00:00", "gpu", "1:00:00", False),
    ],
)
def test_a_job_that_slurm_would_take_and_never_start_is_refused(
    limits: str, partition: str | None, time: str, refused: bool
) -> None:
    slurm, _ = scheduler((0, limits, ""))
    wanted = request(partition=partition, time=time)
    if refused:
        with pytest.raises(UsageError, match=f"time='{time}' is not allowed here"):
            slurm.check(wanted)
    else:
        slurm.check(wanted)


def test_a_time_is_compared_with_the_limit_of_the_partition_that_sbatch_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's SBATCH_PARTITION counts where no partition is given, and a QOS may allow more than a partition."""
    slurm, client = scheduler((0, "", ""), (0, "long 9-00:00:00", ""))
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    slurm.check(request(time="2-0"))
    assert client.asked[1][-2:] == ("-p", "long")
    slurm, _ = scheduler((0, "", ""), (0, "gpu 1:00:00", ""))
    slurm.check(request(partition="gpu", qos="long", time="2-0"))
    monkeypatch.setenv("SBATCH_QOS", "long")
    slurm.check(request(partition="gpu", time="2-0"))


def test_a_job_is_not_submitted_to_a_cluster_on_which_it_is_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm, client = scheduler((0, "", ""))
    monkeypatch.setenv("SBATCH_CLUSTERS", "big")
    with pytest.raises(UsageError, match=r"SBATCH_CLUSTERS=big .*: export SLURM_CLUSTERS=big, too"):
        slurm.check(request())
    assert not client.asked
    monkeypatch.setenv("SLURM_CLUSTERS", "big")
    slurm.check(request())


def test_a_busy_controller_is_asked_again() -> None:
    slurm, client = scheduler(BUSY, BUSY, (0, "", ""))
    assert slurm.requeue(job("7_2"), pause_s=0) is None
    assert client.asked == [("scontrol", "requeue", "7_2")] * 3


def test_a_controller_that_stays_busy_is_not_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow, and there is none after the last try: the job has little time left."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    slurm, _ = scheduler(BUSY)
    assert slurm.requeue(job("7"), tries=3, pause_s=2) == BUSY[2]
    assert pauses == [2, 4]


def test_a_refusal_is_final() -> None:
    slurm, client = scheduler(BUSY, NEVER)
    assert slurm.requeue(job("7"), pause_s=0) == "Requested operation is presently disabled for job 7"
    assert len(client.asked) == 2


def test_a_requeue_whose_answer_was_lost_has_been_done() -> None:
    """SLURM counts the restart at once, and refuses the next request: the job is pending."""
    lost = (1, "", "slurm_requeue error: Zero Bytes were transmitted or received")
    pending = (1, "", "Job is pending execution for job 7")
    slurm, client = scheduler(lost, (0, "None  0\n", ""), pending, (0, "BeginTime  1\n", ""))
    assert slurm.requeue(job("7"), pause_s=0) is None
    assert [command[0] for command in client.asked] == ["scontrol", "squeue"] * 2


def test_a_job_that_was_requeued_after_its_time_limit_is_requeued() -> None:
    slurm, _ = scheduler((0, "TimeLimit  1\n", ""))
    assert slurm.ended_by(job("7")) == "requeue"


def test_a_refusal_after_a_lost_answer_is_final_too() -> None:
    """SLURM kills the job half a minute after its time limit: the next job must be submitted by then."""
    lost = (1, "", "slurm_requeue error: Zero Bytes were transmitted or received")
    slurm, client = scheduler(lost, (0, "None  0\n", ""), NEVER, (0, "None  0\n", ""))
    assert slurm.requeue(job("7"), pause_s=0) == "Requested operation is presently disabled for job 7"
    assert [command[0] for command in client.asked] == ["scontrol", "squeue"] * 2


def test_a_requeue_without_an_answer_may_have_been_done() -> None:
    """To submit another job then could start the run twice."""
    slurm, client = scheduler((124, "", "scontrol did not answer within 120 s"))
    with pytest.raises(
        HeadwayError, match="scontrol did not answer within 120 s: SLURM's controller is busy"
    ):
        slurm.requeue(job("7"), pause_s=0)
    assert len(client.asked) == 1


@pytest.mark.parametrize(
    ("said", "settings", "sentence"),
    [
        (
            "sbatch: error: invalid partition specified: gup",
            {"partition": "gup"},
            "there is no partition 'gup'; did you mean 'gpu'? There are: cpu, gpu",
        ),
        (
            "Invalid account or account/partition combination specified",
            {"account": "lab"},
            "account 'lab' may not be charged for this partition; there are: cpu, gpu",
        ),
        ("Invalid qos specification", {"qos": "hi"}, "qos 'hi' is not available to you; there are: cpu, gpu"),
        (
            "allocation failure: Requested time limit is invalid (missing or exceeds some limit)",
            {"time": "9-0"},
            "time='9-0' is not allowed here; limits: cpu, gpu",
        ),
        (
            "allocation failure: Requested node configuration is not available",
            {"mem": "9T"},
            "no nodes here can serve a node with 1 CPUs, 9T of memory; there are: cpu; gpu",
        ),
        (
            "allocation failure: Invalid feature specification",
            {"constraint": "x"},
            "no node has the features 'x'; there are: cpu, gpu",
        ),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            {"nodes": 2},
            "SLURM's limits for you or this partition forbid 2 nodes x 1 tasks; ask for less",
        ),
        (
            "sbatch: error: fetch_config: lookup failed\nsbatch: fatal: Could not establish a configuration source",
            {},
            "SLURM's programs are installed, but no cluster is configured: submit from a login node, or set SLURM_CONF",
        ),
        ("sbatch: error: something new", {}, "SLURM refuses the job: something new"),
        ("sbatch: error: invalid partition specified: ", {}, "give --partition; there are: cpu, gpu"),
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            {},
            "give --time; limits: cpu, gpu",
        ),
        ("Invalid qos specification", {}, "give --qos; there are: cpu, gpu"),
    ],
)
def test_refusals(said: str, settings: Any, sentence: str) -> None:
    _, client = scheduler((0, "cpu\ngpu\n", ""))
    error = refusal(said, request(**settings), cast(SlurmClient, client))
    assert isinstance(error, UsageError)
    assert str(error).startswith(sentence)


def test_a_refusal_names_what_sbatch_has_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PARTITION": "gup", "TIMELIMIT": "9-0", "QOS": "hi", "ACCOUNT": "lab"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    found = {
        "invalid partition specified": "there is no partition 'gup'; did you mean 'gpu'?",
        "time limit is invalid": "time='9-0' is not allowed here",
        "Invalid qos specification": "qos 'hi' is not available to you",
        "Invalid account": "account 'lab' may not be charged",
    }
    for said, sentence in found.items():
        _, client = scheduler((0, "cpu\ngpu\n", ""))
        assert str(refusal(said, request(), cast(SlurmClient, client))).startswith(sentence)


def test_a_refusal_is_explained_to_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    _, client = scheduler((0, "cpu\ngpu\n", ""))
    for said in ("Invalid account or account/partition combination", "Job violates accounting/QOS policy"):
        assert isinstance(refusal(said, request(), cast(SlurmClient, client)), UsageError)


def test_a_controller_that_is_down_is_no_mistake_of_the_user() -> None:
    error = refusal("sbatch: error: Unable to contact slurm controller", request(), SlurmClient())
    assert type(error) is SchedulerUnreachable
    assert "does not answer" in str(error)


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "may_be_queued"),
    [
        ("Unable to contact slurm controller (connect failure)", False),
        ("Connection refused", False),
        ("connect: Connection timed out\nUnable to contact slurm controller (connect failure)", False),
        ("Unable to contact slurm controller (send failure)", True),
        ("Unable to contact slurm controller (receive failure)", True),
        ("Socket timed out on send/recv operation", True),
        ("Zero Bytes were transmitted or received", True),
    ],
)
def test_a_job_may_be_queued_only_if_a_controller_got_it(said: str, may_be_queued: bool) -> None:
    slurm, _ = scheduler((1, "", FAILED + said))
    with pytest.raises(HeadwayError) as error:
        slurm.submit(request(), Path("job.sh"))
    assert (type(error.value) is HeadwayError) == may_be_queued, "as the interface says"
    assert isinstance(error.value, SchedulerUnreachable) != may_be_queued


@pytest.mark.parametrize(
    ("out", "number", "cluster"),
    [
        ("7\n", "7", None),
        ("7;big\n", "7", "big"),
        ("-----> Welcome to Big\n--> Verifying quota 12 ... OK\n7;big\n", "7", "big"),
        ("12 nodes are free\n7\nhave fun\n", "7", None),
    ],
)
def test_what_a_site_prints_beside_the_number_is_not_the_number(
    out: str, number: str, cluster: str | None
) -> None:
    slurm, _ = scheduler((0, out, ""))
    found = slurm.submit(request(), Path("job.sh"))
    assert (found.job_id, found.cluster_name) == (number, cluster)


def test_a_job_without_a_number_may_be_queued() -> None:
    slurm, _ = scheduler((0, "Submitted batch job seven\n", ""))
    with pytest.raises(HeadwayError, match=r"did not print the number of the job, but ") as error:
        slurm.submit(request(), Path("job.sh"))
    assert type(error.value) is HeadwayError


def test_answers_may_have_any_encoding() -> None:
    answer = SlurmClient().run("printf", r"w\344hle eine Partition")
    assert answer.code == 0 and answer.out.endswith("hle eine Partition")


def test_an_array_is_checked_with_all_its_jobs() -> None:
    wanted = dataclasses.replace(request(), is_array=True, array_size=2000)
    slurm, client = scheduler(
        (1, "", f"{FAILED}Invalid job array specification"), (0, "MaxArraySize            = 1001\n", "")
    )
    with pytest.raises(
        UsageError, match=r"refuses an array of 2000 jobs: an array has at most 1001 jobs here"
    ):
        slurm.check(wanted)
    assert "--array=0-1999" in client.asked[0]


# As squeue 22.05 answers: --noheader --states=all --format=%T --jobs=ID
@pytest.mark.parametrize(
    ("code", "out", "complaint", "gone"),
    [
        (0, "RUNNING\n", "", None),
        (0, "COMPLETING\n", "", None),
        (0, "SUSPENDED\n", "", False),
        (0, "PENDING\n", "", True),
        (0, "CANCELLED\n", "", True),
        (0, "COMPLETED\nCOMPLETED\nRUNNING\n", "", None),
        (0, "COMPLETED\nCOMPLETED\n", "", True),
        (0, "", "", True),
        (1, "", "slurm_load_jobs error: Invalid job id specified\n", True),
        (1, "", "squeue: error: Invalid job id: abc\n", None),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", None),
    ],
)
def test_what_squeue_says(code: int, out: str, complaint: str, gone: bool | None) -> None:
    slurm, _ = scheduler((code, out, complaint))
    assert slurm.is_gone(job("7")) is gone


def test_the_end_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedulers.end_time({}) is None
    assert schedulers.end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"}) == 1_800_000_000
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=7 ] && echo "N/A|2026-11-15T10:00:00" || echo "N/A|N/A"\n')
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (
        schedulers.end_time({"SLURM_JOB_ID": "7"}) == datetime(2026, 11, 15, 10).timestamp()
    )  # in local time
    assert schedulers.end_time({"SLURM_JOB_ID": "8"}) is None


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("ahead", [3600, -3600, 0])
def test_the_end_of_a_job_on_a_node_with_a_wrong_clock(
    ahead: int, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An 8-minute job that has just begun, by the controller's clock, has 8 minutes left by the node's.

    An old SLURM does not tell the job by variables when it began and ends.
    """
    now = int(time.time()) - ahead
    sdiag = tmp_path / "sdiag"
    sdiag.write_text(f"#!/bin/sh\necho '****'\necho 'sdiag output at Mon Nov 16 03:18:00 2026 ({now})'\n")
    sdiag.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    job = {"SLURM_JOB_ID": "7"}
    if old:
        squeue = tmp_path / "squeue"
        squeue.write_text(
            f"#!/bin/sh\necho '{'|'.join(datetime.fromtimestamp(at).isoformat() for at in (now, now + 480))}'\n"
        )
        squeue.chmod(0o700)
    else:
        job |= {"SLURM_JOB_START_TIME": str(now), "SLURM_JOB_END_TIME": str(now + 480)}
    end = schedulers.end_time(job)
    assert SlurmScheduler().time_limit_s(job) == 480
    assert end is not None
    assert end - time.time() == pytest.approx(480, abs=30)
    assert ("clock of this node" in caplog.text) == bool(ahead)


VERSION = (0, "slurm-wlm 22.05.8\n", "")


@pytest.mark.parametrize(
    ("answers", "environ", "good", "line"),
    [
        (
            [VERSION, (0, "Slurmctld(primary) at n0 is UP\n", "")],
            {"SLURM_JOB_ID": "7"},
            True,
            "slurm-wlm 22.05.8, in job 7: Slurmctld(primary) at n0 is UP",
        ),
        (
            [VERSION, (0, "Slurmctld(primary) at n0 is DOWN\n", "")],
            {},
            False,
            "slurm-wlm 22.05.8: Slurmctld(primary) at n0 is DOWN",
        ),
        ([(1, "", "sinfo: fatal\n")], {}, False, "sinfo: fatal"),
    ],
)
def test_health(answers: Any, environ: dict[str, str], good: bool, line: str) -> None:
    slurm, _ = scheduler(*answers)
    found = slurm.health(environ)
    assert found and (found.good, found.line) == (good, line)
    assert bool(found.advice) is not good


def test_a_machine_without_slurm_has_no_health_and_no_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmScheduler().health({}) is None
    assert SlurmScheduler().queue([job("7")]) == Queue()
    assert SlurmScheduler().is_gone(job("7")) is None


@pytest.mark.parametrize(
    ("state", "reason", "status"),
    [
        ("PENDING", "Priority", JobStatus(state="queued", why="Priority")),
        ("PENDING", "None", JobStatus(state="queued")),
        ("RUNNING", "n1", JobStatus(state="running")),
        ("COMPLETING", "", JobStatus(state="running", why="completing")),
        ("SUSPENDED", "", JobStatus(state="running", why="suspended")),
        ("COMPLETED", "", JobStatus(state="done")),
        ("CANCELLED by 1000", "", JobStatus(state="cancelled")),
        ("TIMEOUT", "", JobStatus(state="failed", why="ran into its time limit")),
        ("NODE_FAIL", "", JobStatus(state="failed", why="a node failed")),
        ("OUT_OF_MEMORY", "", JobStatus(state="failed", why="out of memory")),
        ("SOMETHING_NEW", "", JobStatus(state="failed", why="something new")),
    ],
)
def test_slurms_state_words(state: str, reason: str, status: JobStatus) -> None:
    slurm, _ = scheduler((0, f"7|{state}|{reason}\n7_3|{state}|{reason}\n", ""))
    queue = slurm.queue([])
    assert queue.find(job("7")) == queue.find(job("7_3")) == status
    assert queue.find(job("7_4")) is None


def test_the_queue_is_asked_once_and_the_accounts_for_what_it_has_forgotten() -> None:
    slurm, client = scheduler(
        (0, "12|PENDING|Priority\n13_1|RUNNING|None\n", ""),
        (0, "9|CANCELLED by 1000|None\n10|NODE_FAIL|None\n12|COMPLETED|\n", ""),
    )
    queue = slurm.queue([job("9"), job("10"), job("12"), job("13_1")])
    assert "--states=all" in client.asked[0], "also of jobs that are just over"
    assert [words[0] for words in client.asked] == ["squeue", "sacct"]
    assert "--jobs=10,9" in client.asked[1]
    assert queue.find(job("12")) == JobStatus(state="queued", why="Priority"), "squeue knows best"
    assert queue.find(job("9")) == JobStatus(state="cancelled")
    forged, client = scheduler((0, "", ""), (0, "", ""))
    forged.queue([job(name) for name in ("8_1", "9", "1,2", "7;8", "--uid=0", "", "9 -a", "\u0664")])
    assert [word for word in client.asked[1] if "jobs" in word] == ["--jobs=8,9"], "only ids of jobs"
    silent, _ = scheduler((1, "", "slurm_load_jobs error: Unable to contact\n"))
    assert silent.queue([job("9")]).note == "slurm_load_jobs error: Unable to contact"
    killed, _ = scheduler((-9, "", ""))
    assert killed.queue([job("9")]).note == "squeue ended with exit code -9", "the job may be in the queue"


def test_jobs_in_hidden_partitions_are_in_the_queue() -> None:
    """squeue leaves them out unless it is asked for all; then it also lists what a federation runs elsewhere."""
    slurm, client = scheduler((0, "12|RUNNING|None\n12|REVOKED|None\n", ""))
    assert slurm.queue([job("12")]).find(job("12")) == JobStatus(state="running")
    assert "--all" in client.asked[0]


def test_names_of_jobs_and_of_their_starts() -> None:
    def ids(**variables: str) -> JobIds:
        found = schedulers.detect({f"SLURM_{name}": value for name, value in variables.items()})
        assert found
        return found

    assert schedulers.detect({}) is None
    assert ids(JOB_ID="7").start == "7-0"
    assert ids(JOB_ID="7", RESTART_COUNT="2").start == "7-2"
    assert ids(JOB_ID="7").number == "7"
    assert ids(JOB_ID="9", ARRAY_JOB_ID="7", ARRAY_TASK_ID="0").number == "7_0"


def test_a_run_directory_cannot_make_headway_import_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(
        UsageError, match=r"the scheduler 'this:d' is not loaded; .* set HEADWAY_SCHEDULER=this:d"
    ):
        schedulers.load("this:d")
    assert "this" not in sys.modules
    queue = schedulers.queue([JobIds(scheduler="this:d", job_id="7")])
    assert queue.note and "is not loaded" in queue.note
    with pytest.raises(UsageError, match="is not a subclass of headway"):
        schedulers.load("os:getcwd")


SOURCE = Path(schedulers.__file__).parents[1]
OF_SLURM = re.compile(r"SLURM_[A-Z]|\b(sbatch|squeue|scontrol|scancel|sinfo|sacct|sacctmgr)\b")
NAME_SLURM = {
    "launcher/targets.py",  # hw.Slurm, whose settings are sbatch's options
    "dist/environment.py",  # the table of launch environments
    "system/redact.py",  # the prefixes of variables that explain a run
}


def test_only_the_implementation_the_target_and_the_launch_environments_name_slurm() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(("schedulers/slurm/", "cli/")) or name in NAME_SLURM:  # cli: help for people
            continue
        tree = ast.parse(path.read_text())
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in statements]
        strings = [
            node.value for node in texts if isinstance(node.value, str) and OF_SLURM.search(node.value)
        ]
        if strings:
            found[name] = strings
    assert not found


def test_ids_are_read_as_they_were_written() -> None:
    ids = JobIds(scheduler="slurm", job_id="7", cluster_name="big", restart_count="1")
    assert JobIds.from_dict(ids.to_dict()) == ids
    assert JobIds.from_dict({"scheduler": None, "ids": {}}) is None
    submitted = {"job_id": "7", "array_task": 2, "cluster": None}
    assert (found := JobIds.from_submission(submitted)) and (found.scheduler, found.number) == (
        "slurm",
        "7_2",
    )
    assert JobIds.from_submission({"pid": 7}) is None
