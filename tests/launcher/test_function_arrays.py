"""Functions as an array of jobs: their arguments, the order of their ends, awaiting them, and what they raise."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from waiting import wait_until

import headway as hw
from headway.dist.failure import remote
from headway.errors import RankFailure, UsageError
from headway.launcher import launch_function
from headway.launcher.functions.exceptions import error_files, read_error, write_error
from headway.launcher.job_start import BACKGROUND
from headway.run.job_record import record_end
from headway.watch.runs import summarize

WORK = """
import threading, time

class TooHot(ValueError):
    def __init__(self, degrees, *, where):
        super().__init__(f"{degrees} degrees in {where}")
        self.degrees, self.where = degrees, where

class Wordy(Exception):
    def __init__(self, what):
        super().__init__(f"no {what}")
        self.what = what
    def __str__(self):
        return f"Wordy: {self.what}"

def gated(gate, number, *, fails=False, base=0):
    while not (gate / str(number)).exists():
        time.sleep(0.01)
    if fails:
        raise TooHot(451, where={"engine": number})
    return base + number

def locks():
    error = Wordy("sense")
    error.lock = threading.Lock()
    raise error
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "work_of_arrays.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)  # jobs start at once
    sys.modules.pop("work_of_arrays", None)
    import work_of_arrays  # type: ignore[import-not-found]

    yield work_of_arrays
    sys.modules.pop("work_of_arrays")


def test_an_array_ends_in_the_order_of_its_jobs_and_one_fails(work: Any, tmp_path: Path) -> None:
    elements = [{"number": 0}, (1,), 2, {"number": 3, "fails": True}]
    jobs = hw.launch(work.gated, tmp_path, array=elements, base=10)
    order = [2, 3, 0, 1]
    assert not any(job.done() for job in jobs)
    ends = []
    (tmp_path / str(order[0])).touch()
    for job in hw.as_completed(jobs, timeout=180):
        ends.append(jobs.index(job))
        if len(ends) < len(order):
            (tmp_path / str(order[len(ends)])).touch()
    assert ends == order and all(job.done() for job in jobs)
    assert [job.result() for job in jobs[:3]] == [10, 11, 12]
    assert [job.exception() is None for job in jobs] == [True, True, True, False]
    error = jobs[3].exception()
    assert type(error) is work.TooHot and str(error) == "451 degrees in {'engine': 3}"
    assert (error.degrees, error.where) == (451, {"engine": 3})
    assert "raise TooHot(451" in str(error.__cause__)
    rows = summarize([job.run for job in jobs])
    assert [row.sweep.settings for row in rows if row.sweep][1:] == [
        {"args": "(1,)"},
        {"args": "2"},
        {"number": "3", "fails": "True"},
    ]
    assert hw.Job.open(jobs[0].run).result() == 10


def test_map_and_await(work: Any, tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / str(number)).touch()
    jobs = hw.launch.map(work.gated, [tmp_path] * 2, range(2), base=5)

    async def both() -> list[int]:
        return await asyncio.gather(*jobs)

    assert asyncio.run(both()) == [5, 6]
    with pytest.raises(UsageError, match="iterables of the same length, and got 2, 1"):
        hw.launch.map(work.gated, [1, 2], [1])

    async def one(job: hw.Job) -> Any:
        return await job

    with pytest.raises(work.Wordy, match="Wordy: sense") as caught:
        asyncio.run(one(hw.launch(work.locks)))
    assert caught.value.what == "sense" and not hasattr(caught.value, "lock")  # a lock stays where it is


def test_jobs_that_ended_between_two_looks_come_in_the_order_of_their_ends(tmp_path: Path) -> None:
    runs = [hw.Run.create(tmp_path / "runs") for _ in range(4)]
    jobs = list(map(hw.Job, runs))
    for number in (2, 0, 1):
        record_end(runs[number], 0)
        ended = json.loads(runs[number].ended_file.read_text())
        ended["time"] = f"2026-11-15T10:00:0{(2, 0, 1).index(number)}.000+00:00"
        runs[number].ended_file.write_text(json.dumps(ended))
    found = hw.as_completed([*jobs, jobs[0]], timeout=0.0)
    assert [jobs.index(next(found)) for _ in range(3)] == [2, 0, 1]
    with pytest.raises(TimeoutError, match="1 of 4 jobs are not over after 0 s"):
        next(found)
    with pytest.raises(UsageError, match="as_completed needs jobs, not 3"):
        hw.as_completed([3])  # type: ignore[list-item]


def test_what_cannot_be_started_stops_what_was(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = launch_function.in_background, []

    def second_fails(run: hw.Run, cwd: Path) -> None:
        if started:
            raise OSError("no more processes")
        start(run, cwd)
        started.append(BACKGROUND[run.id])

    monkeypatch.setattr(launch_function, "in_background", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        hw.launch(work.gated, tmp_path, array=[1, 2, 3])
    assert not list((tmp_path / "runs").iterdir())
    wait_until(lambda: started[0].poll() is not None, "the first job has ended")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([], "array is empty"),
        ("abc", "must be a list with an element for each job"),
        (3, "must be a list"),
        ([{"base": 1}], "array sets 'base', which is given for all jobs as well"),
        ([{1: 2}], "1 cannot be a keyword"),
        (range(100_000), "more than 10000"),
        (range(9_999), "free memory"),
    ],
)
def test_mistakes(work: Any, tmp_path: Path, array: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hw.launch(work.gated, tmp_path, array=array, base=0)
    assert not (tmp_path / "runs").exists()


class Slotted(Exception):
    """Pickle gives another text again: it calls __init__ with the text."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no {what}")
        self.what = what


class NotHere(Exception):
    def __init__(self, what: str) -> None:
        self.what = what

    def __str__(self) -> str:
        return self.what

    def __reduce__(self) -> Any:
        raise OSError("cannot be packed")


@pytest.mark.parametrize(
    "error",
    [
        KeyError(("a", 1)),
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        Slotted("sense"),
        ImportError("no", name="that"),
        ExceptionGroup("two", [ValueError(1), KeyError(2)]),
    ],
)
def test_exceptions_come_back_as_they_were(error: Exception, tmp_path: Path) -> None:
    error.add_note("seen")
    write_error(tmp_path, error, 7)
    again = read_error(tmp_path, 7)
    assert type(again) is type(error) and str(again) == str(error) and repr(again) == repr(error)
    assert vars(again) == vars(error)
    for name in ("filename", "errno", "start", "name"):
        assert getattr(again, name, None) == getattr(error, name, None)
    assert isinstance(again.__cause__, remote.RemoteTraceback)


def test_what_cannot_be_packed_comes_as_text(tmp_path: Path) -> None:
    write_error(tmp_path, error := NotHere("gone"), 0)
    again = read_error(tmp_path, 0)
    assert type(again) is NotHere and again.what == "gone" and str(error) == str(again), "taken apart"
    write_error(tmp_path, SystemExit(3), 1)
    again = read_error(tmp_path, 1)
    assert type(again) is RankFailure and "SystemExit: 3" in str(again), "it must not end this process"
    error_files(tmp_path, 0)[0].unlink()
    again = read_error(tmp_path, 0)
    assert type(again) is RankFailure and str(again) == "rank 0 raised NotHere: gone"


class Opened:
    def __reduce__(self) -> Any:
        return os.mkdir, ("opened",)


def test_an_exception_that_others_could_have_written_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_error(tmp_path, ValueError(1), 0)
    whole, description = error_files(tmp_path, 0)
    whole.write_bytes(pickle.dumps(Opened()))
    for path in (whole, description):
        path.chmod(0o622)
        with pytest.raises(UsageError, match="can be written by others"):
            read_error(tmp_path, 0)
        path.chmod(0o600)
    run = hw.Run.create(tmp_path / "runs")
    run.call_dir.mkdir()
    (run.call_dir / "rank-00000.error.json").write_bytes(description.read_bytes())
    (run.call_dir / "rank-00000.error.pickle").write_bytes(pickle.dumps(Opened()))
    run.write_failure({"rank": 0, "kind": "exception", "error": "x"})
    record_end(run, 1)
    run.call_dir.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by others"):
        raise hw.Job(run)._error()
    assert not (tmp_path / "opened").exists()
