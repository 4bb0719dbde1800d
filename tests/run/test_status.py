"""The state of a run, from what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headway.run import Run, lock
from headway.run.job_record import record_end, record_start
from headway.run.status import Status, check_over, status
from headway.schedulers.base import JobIds, Queue
from headway.schedulers.slurm.queue import job_status
from headway.system.locks import ProcessIdentity

NOBODY = Queue()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", name="digits", config={"lr": 0.1})


def submitted(run: Run, **facts: Any) -> None:
    run.submission_file.write_text(json.dumps({"array_task": None, **facts}))


def state(run: Run, queue: Queue = NOBODY) -> tuple[str, str]:
    found = status(run, queue)
    return found.state, found.why


def slurm(**statuses: tuple[str, str]) -> Queue:
    found = {("slurm", job[1:]): job_status(word, why) for job, (word, why) in statuses.items()}
    return Queue(statuses=found)


def test_what_the_run_wrote_down(run: Run) -> None:
    assert state(run) == ("new", "")
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    assert state(run) == ("done", "")
    why = "stopped by SIGTERM after step 7, with a checkpoint: the same command resumes"
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75, why=why)
    assert state(run) == ("stopped", why)
    number = run.begin_attempt(world={})
    run.write_failure({"rank": 3, "step": 7, "error": "ValueError: bad\n  thing"})
    run.end_attempt(number, status="failed", exit_code=1)
    assert state(run) == ("failed", "rank 3 at step 7: ValueError: bad thing")
    hang = {"kind": "hang", "rank": 0, "step": 7, "error": "for 30 s no rank has made progress"}
    run.write_failure(hang, overwrite=True)
    assert state(run) == ("failed", "for 30 s no rank has made progress"), "it is not rank 0's"


def test_a_script_that_fails_after_its_training_has_failed(run: Run) -> None:
    number = run.begin_attempt(world={})
    run.end_attempt(number, status="done", exit_code=0)
    run.note_attempt(number, script_ended=False)
    assert state(run) == ("done", "")
    run.write_failure({"rank": 0, "step": None, "error": "UsageError: logits.npy exists already"})
    assert state(run) == (
        "failed",
        "after the training was done: rank 0: UsageError: logits.npy exists already",
    )
    run.note_attempt(number, script_ended=True)  # the same command did what was left
    assert state(run) == ("done", "")


@pytest.mark.parametrize("ending", ["stopped", "failed", "interrupted"])
@pytest.mark.parametrize("code", [1, 2, 74, 75, 86, 93, 130, 143])
def test_every_end_but_a_good_one_has_a_reason_that_stays(ending: str, code: int, run: Run) -> None:
    """Whoever recorded it, and whoever asks: the run alone, the supervisor alone, the queue alone, or nobody."""
    over = slurm(_7=("TIMEOUT", ""))
    submitted(run, job_id="7")
    record_end(run, code)
    alone = state(run)
    assert (alone[1] != "") == (alone[0] in ("stopped", "failed", "interrupted"))
    number = run.begin_attempt(world={})
    run.end_attempt(number, status=ending, exit_code=code)
    assert state(run)[0] == ending and state(run)[1]
    assert state(run, over) == (ending, "ran into its time limit")
    record_end(run, code, error="a node fell over")
    assert state(run) == state(run, over) == (ending, "a node fell over"), (
        "also when the queue has forgotten it"
    )
    run.write_failure({"kind": "agent", "rank": None, "error": "the agent on n1 was killed"})
    assert state(run) == state(run, over) == (ending, "the agent on n1 was killed")
    assert "why" not in run.info()["attempts"][-1], "an attempt of an older version"


def test_the_end_is_recorded_without_a_readable_run_json(run: Run) -> None:
    """A file server that fails for a moment must not hide why a job ended, nor keep it from being queued again."""
    run.info_file.write_text("{")
    record_end(run, 143, error="out of time")
    ended = json.loads(run.ended_file.read_text())
    assert (ended["exit_code"], ended["error"], ended["exit_s"]) == (143, "out of time", None)


def test_running_needs_a_sign_of_life(run: Run) -> None:
    number = run.begin_attempt(world={})
    assert state(run) == ("lost", "it ended without recording how")
    with run.lock():
        assert state(run) == ("running", "")
    assert state(run)[0] == "lost", "the lock was given back, and the attempt never said how it ended"
    run.end_attempt(number, status="done", exit_code=0)
    assert state(run) == ("done", "")


def test_a_killed_owner_is_not_alive(run: Run) -> None:
    code = "import os, sys; from headway.run import Run; r = Run.open(sys.argv[1])\n"
    code += "with r.lock(): r.begin_attempt(world={}); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    assert killed.returncode == -9
    word, why = state(run)
    assert word == "lost" and "is gone" in why
    run.write_failure({"rank": 1, "step": 7, "error": "was killed by SIGKILL"})  # by the agent
    assert state(run) == ("failed", "rank 1 at step 7: was killed by SIGKILL")


@pytest.mark.parametrize(
    ("slurm_words", "expected"),
    [
        (("PENDING", "Priority"), ("queued", "Priority")),
        (("PENDING", ""), ("queued", "")),
        (("RUNNING", "n1"), ("running", "")),
        (("COMPLETING", ""), ("running", "completing")),
        (("SUSPENDED", ""), ("running", "suspended")),
        (("COMPLETED", ""), ("done", "")),
        (("CANCELLED", ""), ("cancelled", "")),
        (("TIMEOUT", ""), ("failed", "ran into its time limit")),
        (("NODE_FAIL", ""), ("failed", "a node failed")),
        (("OUT_OF_MEMORY", ""), ("failed", "out of memory")),
        (("SOMETHING_NEW", ""), ("failed", "something new")),
    ],
)
def test_the_schedulers_word(run: Run, slurm_words: tuple[str, str], expected: tuple[str, str]) -> None:
    submitted(run, job_id="12")
    assert state(run, slurm(j12=slurm_words)) == expected
    submitted(run, job_id="12", array_task=3)
    assert state(run, slurm(j12_3=slurm_words)) == expected
    assert state(run, slurm(j12_4=slurm_words))[0] == "lost"


def test_a_job_that_is_queued_again_is_queued_whatever_its_last_attempt_says(run: Run) -> None:
    submitted(run, job_id="12")
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    record_end(run, 75)
    assert state(run, slurm(j12=("PENDING", "BeginTime"))) == ("queued", "BeginTime")
    assert state(run, slurm(j12=("COMPLETED", "")))[0] == "stopped"
    assert state(run)[0] == "stopped"
    run.begin_attempt(world={})  # the note of its earlier end does not speak for the new attempt
    assert state(run, slurm(j12=("NODE_FAIL", ""))) == ("failed", "a node failed")


def test_an_end_belongs_to_its_attempt_whatever_the_clocks_say(run: Run) -> None:
    """A job that is requeued starts on another node, whose clock may be behind that of the last one."""
    run.begin_attempt(world={})
    record_end(run, 75)
    ended = json.loads(run.ended_file.read_text())
    run.ended_file.write_text(json.dumps(ended | {"time": "2099-01-01T00:00:00.000+00:00"}))
    assert state(run)[0] == "stopped"
    number = run.begin_attempt(world={})
    assert run.info()["attempts"][0]["status"] == "stopped"
    assert state(run)[0] == "lost", "the second was killed"
    record_end(run, 143)
    assert state(run)[0] == "interrupted"
    ended = json.loads(run.ended_file.read_text())
    run.ended_file.write_text(json.dumps(ended | {"time": "1999-01-01T00:00:00.000+00:00"}))
    assert state(run)[0] == "interrupted" and ended["attempts"] == number


def test_a_heartbeat_of_a_job_that_is_over_is_none(run: Run) -> None:
    """The node was lost: its owner has released nothing, and only its scheduler knows."""

    def leave(job: str) -> None:
        ids = JobIds(scheduler="slurm", job_id=job)
        owner = lock.Owner(host="n3", machine="other", pid=77, born="5", attempt=1, job=ids, beat=9)
        (run.lock_dir / "owner-00001.json").write_bytes(owner.record())

    submitted(run, job_id="12")
    run.begin_attempt(world={})
    run.lock_dir.mkdir(exist_ok=True)
    leave("12")
    over = slurm(j12=("NODE_FAIL", ""))
    assert status(run, over) == Status(state="failed", why="a node failed")
    assert state(run, slurm(j12=("CANCELLED", "")))[0] == "cancelled"
    assert state(run)[0] == "running", "nobody knows"
    leave("13")
    assert state(run, over)[0] == "running", "it is another job's by now"
    leave("12")
    run.failure_file.write_text(json.dumps({"rank": 1, "step": 7, "error": "ValueError: bad"}))
    assert state(run, over) == ("failed", "rank 1 at step 7: ValueError: bad")


def test_a_job_that_outlives_its_attempt_says_so(run: Run) -> None:
    """srun may wait for a node that crashed and came back: the run is over, and its nodes are kept."""
    submitted(run, job_id="12")

    def running_since(seconds: float) -> Queue:
        started = datetime.fromtimestamp(time.time() - seconds).isoformat(timespec="seconds")
        return Queue(statuses={("slurm", "12"): job_status("RUNNING", "", started)})

    number = run.begin_attempt(world={})
    with run.lock():
        assert state(run, running_since(9)) == ("running", ""), "it trains"
    run.write_failure({"rank": 1, "step": 7, "error": "is gone"})
    held = "SLURM job 12 still holds its nodes"
    by_its_record = ("running", f"attempt 1 is failed: rank 1 at step 7: is gone; {held}")
    assert state(run, running_since(9)) == by_its_record, "rank 0 was killed before it could record its end"
    run.end_attempt(number, status="failed", exit_code=1)
    assert state(run, running_since(9)) == by_its_record
    assert state(run, running_since(-9)) == ("running", ""), "the attempt is that of an earlier start"
    run.failure_file.unlink()
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    assert state(run, running_since(9)) == ("running", f"attempt 2 is done; {held}")


def test_a_stop_that_came_too_late_has_a_reason(run: Run) -> None:
    submitted(run, job_id="12")
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    assert state(run, slurm(j12=("TIMEOUT", ""))) == ("stopped", "ran into its time limit")
    record_end(run, 75)
    assert state(run, slurm(j12=("TIMEOUT", ""))) == ("stopped", "ran into its time limit")


def test_a_scheduler_that_does_not_answer_is_no_evidence(run: Run) -> None:
    submitted(run, job_id="12")
    silent = Queue(note="squeue did not answer within 10 s")
    found = status(run, silent)
    assert not found.certain and not found.over and found.why.endswith("squeue did not answer within 10 s")
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    assert not status(run, silent).over, "it may be queued again"
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    assert status(run, silent).over


def test_a_job_that_a_scheduler_was_asked_to_take_may_be_queued(run: Run) -> None:
    submitted(run, scheduler="slurm")
    found = status(run, NOBODY)
    assert (found.state, found.certain, found.over) == ("queued", False, False)
    assert found.why.endswith(f"if it is not in the queue: headway resume {run.path}")
    check_over(run, found)  # so it may be started again
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    assert state(run)[0] == "queued", "it was stopped, and is started again"
    with run.lock():
        run.begin_attempt(world={})
        assert state(run) == ("running", "")
    record_end(run, 1)
    assert state(run)[0] == "failed", "it has started, and could not note its number"


def test_training_by_hand_after_an_answer_that_was_lost_counts(run: Run) -> None:
    submitted(run, scheduler="slurm", time=datetime.now().astimezone().isoformat(timespec="seconds"))
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    assert state(run) == ("done", "")
    submitted(run, scheduler="slurm", time="2999-01-01T00:00:00+00:00")
    assert state(run)[0] == "queued", "it was submitted after that"


def test_how_a_script_without_attempts_ended(run: Run) -> None:
    submitted(run, job_id="12")
    assert state(run) == ("lost", "SLURM job 12 is not known to its scheduler here, and left no record")
    for code, word in (
        (0, "done"),
        (75, "stopped"),
        (130, "interrupted"),
        (143, "interrupted"),
        (3, "failed"),
    ):
        record_end(run, code)
        assert state(run)[0] == word
    assert state(run)[1] == "exit code 3"
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    record_end(run, 1)
    assert state(run)[0] == "failed", "it trained to the end, and failed after that"
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    record_end(run, 1)
    assert state(run)[0] == "stopped", "whatever happened after that, it can be resumed"


def test_a_job_in_the_background_of_a_process(run: Run) -> None:
    submitted(run, **ProcessIdentity.of().to_dict())
    assert state(run) == ("running", "")
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    assert state(run) == ("running", ""), "what it does after training is part of it"


def test_a_job_whose_process_is_gone_or_elsewhere(run: Run) -> None:
    submitted(run, **(ProcessIdentity.of().to_dict() | {"born": "0"}))
    word, why = state(run)
    assert word == "lost" and f"pid {os.getpid()} is gone" in why
    submitted(run, **(ProcessIdentity.of().to_dict() | {"machine": "another", "host": "n7"}))
    assert state(run) == ("running", "on n7, which cannot be checked from here")


def test_a_script_without_attempts_runs_as_long_as_who_started_it(run: Run) -> None:
    record_start(run)
    assert state(run) == ("running", "")
    (start,) = map(json.loads, run.starts_file.read_text().splitlines())
    for change, expected in (
        ({"born": "0"}, "lost"),
        ({"machine": "another", "host": "n7"}, "running"),
        ({"machine": "boot pid:[1]"}, "lost"),  # this host, before it was started again
        ({"pid": None}, "new"),  # as older versions wrote it
        ({"job": "7"}, "new"),  # which its scheduler knows
    ):
        run.starts_file.write_text(json.dumps(start | change) + "\n")
        assert state(run)[0] == expected, change
    run.starts_file.write_text(json.dumps(start) + "\n")
    record_end(run, 0)
    run.ended_file.unlink()
    assert state(run) == ("new", "")


def test_an_end_from_before_a_rebuild_is_not_the_end_of_later_attempts(run: Run) -> None:
    run.end_attempt(run.begin_attempt(world={}), status="done", exit_code=0)
    run.ended_file.write_text(json.dumps({"exit_code": 1, "time": "2000", "attempts": 5}))
    assert state(run) == ("done", "")


UNRECORDED: dict[str, tuple[dict[str, dict[str, Any]], tuple[str, int | None]]] = {
    "nothing": ({}, ("lost", None)),
    "failure": ({"failure.json": {"kind": "vanished", "exit_code": 1}}, ("failed", 1)),
    "storage": ({"failure.json": {"kind": "exception", "exit_code": 74}}, ("failed", 74)),
    "Ctrl-C": ({"failure.json": {"kind": "interrupted", "exit_code": 130}}, ("interrupted", 130)),
    "no code": ({"failure.json": {"kind": "hang"}}, ("failed", 1)),
    "set aside": ({"failure-2.json": {"kind": "vanished", "exit_code": 1}}, ("failed", 1)),
    "of another": ({"failure-1.json": {"kind": "vanished", "exit_code": 1}}, ("lost", None)),
    "terminated": ({"ended.json": {"exit_code": 143, "time": "9"}}, ("interrupted", 143)),
    "killed": ({"ended.json": {"exit_code": 137, "time": "9"}}, ("failed", 137)),
    "earlier end": ({"ended.json": {"exit_code": 143, "time": "1"}}, ("lost", None)),
    "both": (
        {"failure.json": {"kind": "vanished", "exit_code": 1}, "ended.json": {"exit_code": 143, "time": "9"}},
        ("failed", 1),
    ),
}


@pytest.mark.parametrize("case", UNRECORDED)
def test_an_end_that_was_not_recorded_has_one_answer(case: str, run: Run) -> None:
    """What `headway runs` shows before the next attempt begins is what that attempt writes."""
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    run.begin_attempt(world={})
    records, (word, code) = UNRECORDED[case]
    for name, record in records.items():
        (run.path / name).write_text(json.dumps({"rank": 1, "error": "x", **record}))
    assert state(run)[0] == word
    run.begin_attempt(world={})
    assert [run.info()["attempts"][1][key] for key in ("status", "exit_code")] == [word, code]
