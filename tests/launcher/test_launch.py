"""Functions on many processes: what they return, what they raise, and what becomes of them."""

from __future__ import annotations

import ctypes
import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import warm
from waiting import wait_until

import headway as hw
from headway import cli, dist
from headway.dist import shared_run
from headway.errors import (
    HeadwayError,
    MissingExtra,
    RankFailure,
    RunLocked,
    Stopped,
    StorageError,
    UsageError,
)
from headway.launcher import job_start as start, launch_function
from headway.launcher.functions import pickled, worker
from headway.launcher.functions.worker import Call
from headway.launcher.program import JobFile, Program
from headway.run.job_record import record_end
from headway.run.status import status
from headway.schedulers.base import Queue
from headway.system.locks import ProcessIdentity
from headway.watch.runs import summarize

WORK = """
import os, signal, sys, time
import headway as hw

class TooHot(ValueError):
    def __init__(self, degrees, *, where):
        super().__init__(f"{degrees} degrees in {where}")
        self.degrees = degrees

def whole(x, *, y, group):
    import torch
    total = torch.tensor([hw.rank() + 1.0])
    torch.distributed.all_reduce(total)
    own = torch.tensor([hw.rank() + 1.0])
    torch.distributed.all_reduce(own, group=group)
    print("rank", hw.rank(), "says", repr(os.environ["WORD"]))
    return {"rank": hw.rank(), "x": x, "y": y, "all": total.item(), "group": own.item()}

def finish(path, result):
    path.write_text(f"{hw.rank()} {result['rank']}")

def hot():
    if hw.rank() == 1:
        raise TooHot(451, where="engine")
    hw.barrier()

def killed():
    if hw.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hw.barrier()

def waits(path):
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(100)

def leaves():
    sys.exit(0)

def second_time(path):
    if path.exists():
        return "went on"
    path.touch()
    raise LookupError("the first time")

def trains(epochs, stop):
    # asks to be stopped in its first epoch, once
    import torch
    class Fit(hw.TrainValStage):
        def step(self, batch):
            if stop and hw.Run.open(os.environ["HEADWAY_RUN"]).info()["attempts"][1:] == []:
                os.kill(os.getpid(), signal.SIGUSR2)
            return self.models["net"](batch[0]).square().mean()
    pipe = hw.Pipeline(name="inner", config={"epochs": epochs})
    pipe.register_model("net", torch.nn.Linear(2, 1))
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1), model="net")
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    for name in ("train", "val"):
        pipe.register_dataset(name, hw.data.DataLoader(data, batch_size=2))
    pipe.append_stage(Fit(), max_epochs=epochs)
    pipe.enable_checkpointing("elsewhere", resume="auto", every=1)
    pipe.run()
    return os.environ["HEADWAY_RUN"]

def generator():
    return (number for number in range(3))
"""

WORD = 'it\'s "quoted" $(id)\n;'


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of functions, in a folder that only this process imports from."""
    (tmp_path / "work_of_ranks.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)  # jobs start at once
    sys.modules.pop("work_of_ranks", None)
    import work_of_ranks  # type: ignore[import-not-found]

    yield work_of_ranks
    sys.modules.pop("work_of_ranks")


def test_results_groups_log_and_the_end(work: Any, tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    job = hw.launch(
        work.whole,
        (1, Path("x")),
        on=hw.Local(nproc=3, device="cpu", env={"WORD": WORD}),
        groups=[[1], [0, 2]],
        upon_finish=functools.partial(work.finish, finished),
        y=slice(2),
    )
    assert job.state() in ("running", "done")
    expected = [
        {"rank": rank, "x": (1, Path("x")), "y": slice(2), "all": 6.0, "group": own}
        for rank, own in ((0, 4.0), (1, 2.0), (2, 4.0))
    ]
    assert job.results() == expected
    assert job.result() == expected[0] and job.wait(0) == "done"
    assert finished.read_text() == "0 0"
    assert f"rank 2 says {WORD!r}\n" in job.log()
    again = hw.Job.open(job.run.path)
    assert again.id == job.id == job.run.id and again.results() == expected and again.state() == "done"
    assert repr(again) == f"Job('{job.id}': done)"
    assert job.run.name == "whole" and job.run.info()["command"] == ["headway.launch", "work_of_ranks:whole"]
    assert {path.stat().st_mode & 0o777 for path in job.run.call_dir.iterdir()} == {0o600}


def test_an_exception_comes_back_with_the_traceback_of_its_rank(work: Any) -> None:
    job = hw.launch(work.hot, on=hw.Local(nproc=2))
    with pytest.raises(work.TooHot, match="451") as caught:
        job.result()
    assert "on rank 1:" in str(caught.value.__cause__)
    assert 'raise TooHot(451, where="engine")' in str(caught.value.__cause__)
    assert job.status().state == "failed" and "rank 1: TooHot: 451 degrees in engine" in job.status().why


def test_a_killed_rank(work: Any) -> None:
    job = hw.launch(work.killed, on=hw.Local(nproc=2))
    with pytest.raises(RankFailure, match=r"rank 1 of 2 .* was killed by SIGKILL") as failure:
        job.result()
    assert job.state() == "failed"
    assert "resume" not in str(failure.value)
    (job.run.checkpoints_dir / "step-000000000014").mkdir(parents=True)
    with pytest.raises(
        RankFailure, match=rf"resume it from step 14 with job.resume\(\) or: headway resume {job.id}"
    ):
        job.result()


def test_waiting_and_cancelling(work: Any, tmp_path: Path) -> None:
    job = hw.launch(work.waits, tmp_path / "begun")
    while not (tmp_path / "begun").exists():
        with pytest.raises(TimeoutError, match=f"{job.id} is still running after 0.1 s"):
            job.wait(timeout=0.1)
    job.cancel()
    assert job.wait(timeout=180) == "interrupted"
    with pytest.raises(HeadwayError, match="was interrupted; there is no result"):
        job.result()
    job.cancel()  # nothing left to do, and no other process of that number is hit


def test_a_job_whose_keeper_is_killed(work: Any, tmp_path: Path) -> None:
    job = hw.launch(work.waits, tmp_path / "begun")
    wait_until(lambda: (tmp_path / "begun").exists() or job.state() != "running", "the function runs")
    assert job.state() == "running"
    os.kill(json.loads(job.run.submission_file.read_text())["pid"], signal.SIGKILL)
    assert job.wait(timeout=180) == "lost"
    with pytest.raises(RankFailure, match=r"left no result: pid .* is gone and recorded no end"):
        job.result()
    rank = int((tmp_path / "begun").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(rank).wait(30)  # it dies with its parent
    assert not psutil.pid_exists(rank)


def test_no_result(work: Any) -> None:
    jobs = [hw.launch(work.leaves), hw.launch(work.generator)]
    with pytest.raises(RankFailure, match="left no result"):
        jobs[0].result()
    with pytest.raises(
        UsageError, match=r"what work_of_ranks:generator returned cannot be sent to another process \(T"
    ):
        jobs[1].result()


def test_from_a_prompt_and_waiting_at_the_end(tmp_path: Path) -> None:
    """Functions of __main__, a closure, a class of __main__; the process ends without asking for the result."""
    script = """
import headway as hw
class Point:
    def __init__(self, x): self.x = x
def scaled(factor):
    return lambda point: Point(point.x * factor + hw.world_size())
job = hw.launch(scaled(10), Point(4))
def late(path):
    import time
    time.sleep(1)
    open(path, "w").close()
other = hw.launch(late, "late")
result = job.result()
print(type(result) is Point, result.x)
"""
    done = subprocess.run(
        [sys.executable, "-"], input=script, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "True 41\n", done.stderr
    assert (tmp_path / "late").exists()
    assert "headway: waiting for late-" in done.stderr


def test_ctrl_c_while_waiting_stops_what_is_running(work: Any, tmp_path: Path) -> None:  # noqa: ARG001  it is imported
    script = (
        "import work_of_ranks, pathlib, headway as hw; hw.launch(work_of_ranks.waits, pathlib.Path('begun'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr and "waiting for waits-" in process.stderr.readline()
        wait_until(lambda: (tmp_path / "begun").exists() or process.poll() is not None, "the function runs")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert hw.Job.open(run).state() == "interrupted"


def test_a_job_that_is_over_is_started_again_in_its_directory(
    work: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = hw.launch(work.second_time, tmp_path / "been")
    with pytest.raises(UsageError, match="only a run that is over can be started again"):
        job.resume()
    with pytest.raises(LookupError, match="the first time"):
        job.result()
    (row,) = summarize([job.run])
    assert row.attempts == 1 and row.started is not None and 0 < row.seconds < 300, (
        "functions have times, too"
    )
    assert cli.main(["resume", job.run.id, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would call the function of {job.id} again\n"
    assert cli.main(["resume", job.run.id, "--nproc", "2"]) == 2, (
        "a function has a result of each of its ranks"
    )
    assert cli.main(["resume", job.run.id]) == 0, "it follows the job to its end"
    assert capsys.readouterr().out.endswith(f"headway: {job.id} is done\n")
    assert job.result() == "went on" and job.state() == "done"
    (again,) = summarize([job.run])
    assert again.attempts == 2 and again.seconds > row.seconds
    assert (
        cli.main(["resume", job.run.id]) == 2
        and "is done: there is nothing to resume" in capsys.readouterr().err
    )
    assert sorted(path.name for path in job.run.path.glob("failure*")) == ["failure-0.json"]


def test_a_pipeline_in_a_function_trains_in_the_jobs_directory_and_goes_on(work: Any, tmp_path: Path) -> None:
    job = hw.launch(work.trains, 2, stop=True)
    with pytest.raises(Stopped, match=r"job\.resume\(\) resumes from it"):
        job.result()
    assert job.state() == "stopped"
    job.resume()
    assert job.result() == str(job.run.path)
    assert [attempt["status"] for attempt in job.run.info()["attempts"]] == ["stopped", "done"]
    (row,) = summarize([job.run])
    assert (row.status.state, row.step, row.attempts) == ("done", 8, 2)
    assert not (tmp_path / "elsewhere").exists()
    assert job.run.config_file.read_text() == "epochs: 2\n"


def test_mpi(work: Any) -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    without_variables = ("-genvnone",)  # as ssh starts processes on other hosts
    target = hw.Mpi(nproc=2, mpirun=str(mpirun), env={"WORD": "mpi"}, args=without_variables)
    job = hw.launch(work.whole, 1, y=2, groups=[[0, 1]], on=target, root="mine")
    assert [result["group"] for result in job.results()] == [3.0, 3.0]
    assert "rank 1 says 'mpi'" in job.log() and job.run.path.parent.name == "mine"
    assert not Path("runs").exists()


# ---- the processes of a job, each alone


def called(tmp_path: Path, target: hw.Local | hw.Mpi) -> hw.Run:
    """A job that is ready to be started, but for the pickle with its function."""
    run = hw.Run.create(tmp_path / "runs")
    run.call_dir.mkdir()
    Call(function="it", target=target.to_dict(), world_size=1, groups=None, sys_path=sys.path).write(run)
    return run


@pytest.mark.parametrize(
    ("lines", "state", "why"),
    [
        ("kill -TERM $$", "interrupted", ""),
        ("kill -SEGV $$", "failed", "exit code 139"),
        (None, "failed", "FileNotFoundError"),
    ],
)
def test_how_mpirun_ended_is_noted(lines: str | None, state: str, why: str, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    if lines is not None:
        mpirun.write_text(f"#!/bin/sh\n{lines}\n")
        mpirun.chmod(0o755)
    run = called(tmp_path, hw.Mpi(mpirun=str(mpirun)))
    keeper = [sys.executable, "-m", "headway.launcher.functions.background", str(run.path)]
    assert subprocess.run(keeper, stderr=subprocess.DEVNULL).returncode != 0
    found = status(run, Queue())
    assert found.state == state and found.why.startswith(why)


def test_what_is_done_at_the_end_waits_for_all_and_for_what_they_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    run = called(tmp_path, hw.Local())
    result = run.call_dir / "rank-00000.pickle"
    monkeypatch.setattr(worker, "_prepare_process", lambda *_: None)
    monkeypatch.setattr(dist, "init", lambda **_: SimpleNamespace(rank=0))
    monkeypatch.setattr(shared_run, "use_run", lambda _: None)
    parts = (abs, (-3,), {}, events.append)
    monkeypatch.setattr(worker.pickled, "unpack", lambda *_, **__: parts)
    monkeypatch.setattr(dist, "barrier", lambda: events.append(result.exists()))
    assert worker.main([str(run.path)]) == 0
    assert events == [True, 3]
    parts = (sys.exit, (0,), {}, None)
    with pytest.raises(SystemExit):
        worker.main([str(run.path)])
    assert not result.exists(), "what an earlier start returned is not what this one did"


@pytest.mark.parametrize(
    ("newest", "function", "left"),
    [(1, "abs(-3)", ["rank-00000.pickle"]), (2, "abs(-3)", []), (2, "1 / 0", []),
     (1, "1 / 0", ["rank-00000.error.json", "rank-00000.error.pickle"])],
)  # fmt: skip
def test_a_rank_whose_run_was_taken_meanwhile_leaves_no_result(
    newest: int, function: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = called(tmp_path, hw.Local())
    monkeypatch.setattr(worker, "_prepare_process", lambda *_: None)
    monkeypatch.setattr(dist, "init", lambda **_: SimpleNamespace(rank=0))
    monkeypatch.setattr(shared_run, "use_run", lambda _: None)
    monkeypatch.setattr(shared_run, "current_run", lambda: run.held_as(1))
    monkeypatch.setattr(worker.pickled, "unpack", lambda *_, **__: (eval, (function,), {}, None))
    for _ in range(newest):
        with run.lock():
            pass
    expected = RunLocked if newest == 2 else ZeroDivisionError if function == "1 / 0" else None
    with pytest.raises(expected) if expected else nullcontext():
        worker.main([str(run.path)])
    assert sorted(path.name for path in run.call_dir.glob("rank-*")) == left


def test_what_cannot_be_started_leaves_nothing(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(launch_function, "in_background", full)
    with pytest.raises(StorageError, match="no space left"):
        hw.launch(work.leaves)
    assert not list((tmp_path / "runs").iterdir())


def test_a_process_of_the_same_number_on_this_machine_is_not_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hw.Run.create(tmp_path / "runs")
    there = ProcessIdentity.of().to_dict() | {"machine": "another", "host": "n7"}
    run.submission_file.write_text(json.dumps(there))
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    with pytest.raises(UsageError, match="runs on n7, not here: cancel it there"):
        hw.Job.open(run.path).cancel()
    assert not killed


def test_a_job_that_was_started_again_by_hand_is_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that was launched is gone, and its number may be another program's by now."""
    run = hw.Run.create(tmp_path / "runs")
    gone = ProcessIdentity.of().to_dict() | {"born": "1"}
    run.submission_file.write_text(json.dumps(gone))
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    with run.lock():
        run.begin_attempt(world={})
        with pytest.raises(UsageError, match=rf"was started again by hand: end pid {os.getpid()} on "):
            hw.Job.open(run.path).cancel()
    assert not killed


def test_a_start_begins_without_the_end_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hw.Run.create(tmp_path / "runs")
    record_end(run, 1)
    run.write_failure({"rank": 0, "error": "of the last one"})
    JobFile(program=Program(command=["train"]), target=hw.Slurm(array=("lr=1,2",))).write(run)
    submitted: list[hw.Slurm] = []
    monkeypatch.setattr(start, "submit_runs", lambda _, __, target: submitted.append(target))
    start.restart(run)
    assert submitted == [hw.Slurm()], "this run alone, not the whole array"
    assert not run.ended_file.exists() and not run.failure_file.exists()


@pytest.mark.parametrize(("code", "followed"), [(0, 0), (75, 75), (1, 1), (86, 86), (143, 143)])
def test_whoever_follows_a_job_ends_as_it_did(code: int, followed: int, tmp_path: Path) -> None:
    run = hw.Run.create(tmp_path / "runs")
    run.job_log.write_text("all it said\n")
    record_end(run, code)
    out = io.StringIO()
    assert hw.Job(run).follow(out) == followed
    assert out.getvalue().startswith(f"all it said\nheadway: {run.id} is ")


def test_mistakes_are_found_before_anything_is_made(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(UsageError, match=words):
            hw.launch(*args, **options)

    refused("launch needs a function, not 3", 3)
    refused("on='slurm' is not a target", work.hot, on="slurm")
    refused("must hold each of the ranks 0 to 1 exactly once", work.hot, on=hw.Local(nproc=2), groups=[[0]])
    refused("exactly once", work.hot, on=hw.Local(nproc=2), groups=[[0, 1], [1]])
    refused("there is no 'no-mpirun'", work.hot, on=hw.Mpi(mpirun="no-mpirun"))
    refused("give the array to launch", work.hot, on=hw.Slurm(array=("lr=1,2",)))
    refused("free memory", work.hot, on=hw.Local(nproc=100_000))
    refused(r"work_of_ranks:waits with its arguments cannot be sent .*lock", work.waits, threading.Lock())
    refused(r"work_of_ranks:hot\(\) cannot be called .*: too many positional arguments", work.hot, 3)
    refused(r"work_of_ranks:waits\(path\) cannot be called .*: missing .*'path'", work.waits)
    refused("'stopp' is not a valid argument of .*trains .*did you mean 'stop'", work.trains, 3, stopp=True)
    refused("'nproc' is not a valid argument of work_of_ranks:hot or of launch", work.hot, nproc=2)
    refused(
        "groups= passes each rank its process group as the argument 'group': add it to",
        work.hot,
        on=hw.Local(nproc=2),
        groups=[[0, 1]],
    )
    refused("'stopp' is not a valid argument", work.trains, 3, array=[{"stop": 1}, {"stopp": 1}])
    refused("upon_finish=3 is not a function", work.hot, upon_finish=3)
    refused("'a;b' is not a valid run name", work.hot, name="a;b")
    with pytest.raises(UsageError, match="too many positional arguments"):
        hw.launch.map(work.waits, [1, 2], [3, 4])
    monkeypatch.setenv("HEADWAY_RUN", "x")
    monkeypatch.setenv("RANK", "0")
    refused("inside a rank of a job", work.hot)
    assert not (tmp_path / "runs").exists()


def test_a_wrapper_is_called_with_its_own_arguments() -> None:
    """It may add arguments to those of what it wraps; of what is not written in Python, nothing is known."""

    def train(seed: int, lr: float) -> float:
        return seed * lr

    @functools.wraps(train)
    def seeded(*args: Any, **kwargs: Any) -> float:
        return train(1, *args, **kwargs)

    for function, args in ((seeded, (0.1,)), (max, (1, 2)), (functools.partial(train, 3), (0.1,))):
        launch_function._check_calls(function, [(args, {})], groups=None)


def test_a_script_returns_nothing_and_a_plain_run_is_no_job(tmp_path: Path) -> None:
    run = hw.Run.create(tmp_path)
    with pytest.raises(UsageError, match="was neither launched nor submitted"):
        hw.Job.open(run.path)
    with pytest.raises(UsageError, match="runs a script, and scripts return nothing"):
        hw.Job(run).result()


def test_without_cloudpickle_what_can_be_imported_still_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert pickled.pack((os.path.join, functools.partial(max, 3), Path("x")), what="it")
    here = test_without_cloudpickle_what_can_be_imported_still_travels
    for value in (lambda: 1, type("Local", (), {"__module__": "__main__"}), [lambda: 1]):
        with pytest.raises(MissingExtra, match=r"pip install 'headway\[launch\]'"):
            pickled.pack(value, what="it")
    assert here.__name__.encode() not in pickled.pack(max, what="it")


def test_a_pickle_that_others_could_have_written_stays_shut(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(pickled.pack(3, what="it"))
    path.chmod(0o600)
    assert pickled.unpack(path, what="it") == 3
    path.chmod(0o602)
    with pytest.raises(UsageError, match="can be written by others"):
        pickled.unpack(path, what="it")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StorageError, match="could not read it from"):
        pickled.unpack(tmp_path / "link", what="it")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(UsageError, match="belongs to another user, nobody"):
            pickled.unpack(path, what="it")


class Shy:
    """Opened, it fails with an error that pickle does not know."""

    def __setstate__(self, state: object) -> None:
        raise KeyError(state)

    def __getstate__(self) -> object:
        return "a key"


def test_classes_may_raise_what_they_like(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"it cannot be sent to another process \(ValueError: ctypes objects"
    ):
        pickled.pack(ctypes.pointer(ctypes.c_int(1)), what="it")
    path = tmp_path / "p"
    path.write_bytes(pickled.pack(Shy(), what="it"))
    path.chmod(0o600)
    with pytest.raises(HeadwayError, match=r"it cannot be opened here \(KeyError: 'a key'"):
        pickled.unpack(path, what="it")


def test_a_damaged_pickle(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(pickled.pack([1, 2, 3], what="it")[:-3])
    path.chmod(0o600)
    with pytest.raises(HeadwayError, match="it cannot be opened here"):
        pickled.unpack(path, what="it")
