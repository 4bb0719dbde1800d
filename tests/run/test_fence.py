"""Everything that is written into a run passes one fence: an owner that was replaced, and a process that was refused,
write nothing more. Every writer of the run directory is called here as such a process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headway
from headway import checkpoint
from headway.checkpoint.retention import Retention, prune
from headway.errors import RunLocked
from headway.launcher import epilogue
from headway.launcher.agent.outcome import first_failure, record_failure
from headway.launcher.agent.team import Team
from headway.launcher.job_start import restart
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm
from headway.record import diagnostics
from headway.record.ledger import LedgerContents, LedgerRow
from headway.record.sinks.csv import Csv
from headway.record.sinks.feeder import write_description
from headway.run import Run
from headway.run.job_record import record_end
from headway.run.lock import Owner
from headway.run.paths import RunPaths
from headway.system.locks import ProcessIdentity


def take(run: Run, number: int) -> None:
    """Writes the record of another owner: the process that started this one, which lives."""
    identity = ProcessIdentity.of(os.getppid())
    owner = Owner(**identity.to_dict(), attempt=1, job=None)
    run.lock_dir.mkdir(exist_ok=True)
    (run.lock_dir / f"owner-{number:05d}.json").write_bytes(owner.record())


def needs_checkpoints(request: pytest.FixtureRequest) -> bool:
    return any(word in request.node.name for word in ("prune", "damaged"))


@pytest.fixture
def taken(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """A run whose second attempt another process trains."""
    run = Run.create(tmp_path / "runs", name="digits")
    run.nodes_dir.mkdir()
    with run.lock():
        run.begin_attempt(world={})
        for step in (1, 2, 3) if needs_checkpoints(request) else ():
            checkpoint.save(run, {"x": step}, step=step)
        run.begin_attempt(world={})
    take(run, 2)
    return run


@pytest.fixture(params=["replaced", "refused"])
def ours(taken: Run, request: pytest.FixtureRequest) -> Run:
    """The run as a process has it that held it before, or as one that never did."""
    return taken.held_as(1 if request.param == "replaced" else None)


def fail_in_agent(run: Run, *, hang: bool) -> None:
    owner = run.fence.number if run.fence else None
    record: dict[str, Any] = {"kind": "hang" if hang else "vanished", "rank": 1, "error": "is gone"}
    record |= {"exit_code": 1, "failure_file": str(run.failure_file), "owner": owner}
    file = run.path.parent / "failure.json"
    if hang:
        record_failure(record, file)
    else:
        file.write_text(json.dumps(record))
        first_failure(file, {1: -9}, {1: 5})


def fill(file: Path) -> Callable[[Run], None]:
    def write(run: Run) -> None:
        with run.open_rows(run.path / file, content="rows") as rows:
            rows.write({"step": 546})

    return write


WRITERS: dict[str, Callable[[Run], object]] = {
    "begin_attempt": lambda run: run.begin_attempt(world={}),
    "note_attempt": lambda run: run.note_attempt(2, step_ended=546),
    "end_attempt": lambda run: run.end_attempt(2, status="failed", exit_code=74),
    "set_config": lambda run: run.set_config({"lr": 1}),
    "record_snapshot": lambda run: run.record_snapshot({"tree": "elsewhere"}),
    "write_failure": lambda run: run.write_failure({"rank": 0}),
    "write_failure overwrite": lambda run: run.write_failure({"rank": 0}, overwrite=True),
    "the agent's failure": lambda run: fail_in_agent(run, hang=False),
    "the agent's hang": lambda run: fail_in_agent(run, hang=True),
    "record_end": lambda run: record_end(run, 74),
    "restart": restart,
    "diagnostics": lambda run: diagnostics.write(run, {"attempt": 1}),
    "metric rows": fill(Path("metrics/rank-00000.jsonl")),
    "the ledger": fill(Path("ledger.jsonl")),
    "device samples": fill(Path("nodes/n1.jsonl")),
    "the description of a sink": lambda run: write_description(run, Csv()),
    "bad samples": fill(Path("log/quarantine-00000.jsonl")),
    "prune": lambda run: prune(run, Retention(keep_last=2)),
}


def contents(run: Run) -> dict[str, bytes]:
    """Every file with its bytes; an empty one, which a writer of rows makes when it opens it, does not count."""
    found = {str(path.relative_to(run.path)): path for path in run.path.rglob("*")}
    return {
        name: data
        for name, path in sorted(found.items())
        if (data := b"directory" if path.is_dir() else path.read_bytes())
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_a_process_whose_run_is_anothers_writes_nothing(writer: str, ours: Run) -> None:
    before = contents(ours)
    try:
        WRITERS[writer](ours)
    except RunLocked as error:
        assert "taken over" in str(error) or "in use" in str(error)
    assert contents(ours) == before


@pytest.mark.parametrize("writer", sorted(WRITERS.keys() - {"restart"}))
def test_the_same_writers_write_when_the_run_is_ours(writer: str, taken: Run) -> None:
    """Otherwise the test above could not fail. `restart` would start a job."""
    before = contents(taken)
    WRITERS[writer](taken.held_as(2))
    assert contents(taken) != before


def test_a_save_says_that_the_run_was_taken_and_not_that_the_step_exists(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    with run.lock() as lock:
        checkpoint.save(run, {"x": 1}, step=1, lock=lock)
        take(run, 2)
        with pytest.raises(RunLocked, match="taken over"):
            checkpoint.save(run, {"x": 1}, step=1, lock=lock)
        (run.lock_dir / "owner-00002.json").unlink()


def test_a_damaged_checkpoint_is_not_renamed_under_the_process_that_trains(ours: Run) -> None:
    manifest = ours.checkpoint_dir(3) / "manifest.json"
    manifest.write_text("{")
    assert checkpoint.find_valid(ours) == ours.checkpoint_dir(2)
    assert manifest.exists()
    assert checkpoint.find_valid(ours.held_as(2)) == ours.checkpoint_dir(2)
    assert not manifest.exists()


def test_a_refused_job_leaves_no_end_though_the_owner_has_ended_meanwhile(
    taken: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    job = JobFile(program=Program(command=["train"]), target=Slurm())
    job.write(taken)
    team = Team(job.launch_directory(taken, os.environ), number=0, size=1)
    team.begin_round(0)
    record = {"kind": "exception", "rank": 0, "host": "n1", "pid": 5, "error": "RunLocked: in use"}
    record |= {"sentence": "in use", "exit_code": 74, "locked_out": True}
    team.conclude({"exit_code": 74, "record": record})
    team.mark_ended(74)
    file = taken.lock_dir / "owner-00002.json"
    owner = Owner.read(file.read_bytes())
    assert owner is not None
    file.write_bytes(dataclasses.replace(owner, released=True).record())
    assert epilogue.main(str(taken.path), "74") == 74
    assert not taken.ended_file.exists()


def test_the_rows_of_a_newer_attempt_win_wherever_they_are_in_the_file() -> None:
    facts: dict[str, Any] = {
        "stage": "s", "epoch": 0, "world_size": 1, "samples": None, "random": "", "batches": []
    }  # fmt: skip
    rows = [LedgerRow(step=546, attempt=attempt, loss=str(attempt), **facts) for attempt in (2, 1)]
    assert LedgerContents(rows=rows, orders={}).last[546].attempt == 2


# --- no writer is forgotten

_WRITE = re.compile(
    r"(write_atomic|publish|write_new|open_private|make_dir|JsonLinesWriter|AppendOnlyFile|LogFile)\([^)]*"
    r"\b\w*\.(\w+_(?:file|dir|log|script))\b|\.(\w+_(?:file|dir|log|script))(?:\([^)]*\))?"
    r"\.(?:write_text|write_bytes|unlink|rename|mkdir|open\(\"[aw])"
)
_ALLOWED = {
    # of the submission, before there is an owner, or of a start of the job, in a directory of its own
    "launcher/enqueue.py": {"job_script", "submission_file", "ended_file"},  # the last under the lock
    "launcher/program.py": {"job_file"},
    "launcher/sweep.py": {"sweep_file"},
    "launcher/launch_function.py": {"call_dir"},
    "launcher/job_start.py": {"job_log", "submission_file"},  # fenced: "restart"
    "launcher/code/workspace.py": {"work_dir"},  # links, which all nodes of a job may make
    "launcher/functions/worker.py": {"call_dir"},
    # of a process that evaluates, and need not hold the run: rows of its own, never those of training
    "train/evaluate/session.py": {"eval_dir", "eval_file"},
    # of a process that watches: who sends which alert; and of whoever supervises: when a job began and ended
    "record/alerts.py": {"alerts_dir", "alert_file"},
    "run/job_record.py": {"ended_file", "starts_file"},
    # after check_owner, is_ours or under the lock; rows of devices are fenced
    "record/devices/__main__.py": {"nodes_dir"},
    "record/sources.py": {"sources_file"},  # of the attempt that begins, by its number
    "record/sinks/feeder.py": {"sink_file"},
    "record/sinks/replayer.py": {"sink_offset_file", "sink_media_file"},
    "train/diagnose/plan_check.py": {"plan_file"},
    "train/diagnose/window_trace.py": {"trace_file"},
    # of a new run, which nobody else knows yet
    "run/creation.py": {"config_file", "diff_file"},
    # fenced here
    "run/directory.py": {"config_file", "failure_file"},
    "run/rebuild.py": {"info_file"},
    # what a rank prints is part of its own attempt, also that it was replaced
    "record/rank_logs.py": {"log_file"},
}


def writes() -> Iterator[tuple[str, str]]:
    package = Path(headway.__file__).parent
    for module in sorted(package.rglob("*.py")):
        for found in _WRITE.finditer(module.read_text()):
            if (name := found[2] or found[3]) in vars(RunPaths):
                yield str(module.relative_to(package)), name


def test_no_module_writes_into_a_run_past_the_fence() -> None:
    found: dict[str, set[str]] = {}
    for module, name in writes():
        found.setdefault(module, set()).add(name)
    assert found == _ALLOWED, (
        "write through Run.open_rows or after Run.check_owner, and add the writer to WRITERS"
    )
