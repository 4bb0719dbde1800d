"""Saved means committed: a save that fails, wherever it does, is repeated at the next step and costs no interval."""

from __future__ import annotations

import errno
import os
import re
import signal
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_resume import Cut, Traced, make
from torch import Tensor
from waiting import wait_until

import headway as hw
from headway.checkpoint.format.directory import list_steps
from headway.checkpoint.write import disk
from headway.dist.group import current
from headway.errors import Stopped, StorageError
from headway.run import lock
from headway.system import failpoints
from headway.system.environment import FAILPOINT
from headway.testing import faults, ranks
from headway.train import Pipeline
from headway.train.metrics.reporter import Reporter
from headway.train.resume.checkpointer import MAX_FAILURES

alone = pytest.mark.usefixtures("alone")
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
EVERY = 5
POINTS = sorted(set(re.findall(r'failpoint\("(checkpoint\.[a-z_]+)"\)', Path(disk.__file__).read_text())))
WAYS = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


class Faulty(Traced):
    """A save fails from step `at` on. Each step waits until what has become of the last save is known."""

    def __init__(self, fault: str, *, at: int = EVERY, signal_at: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.fault, self.at, self.signal_at = fault, at, signal_at

    def step(self, batch: Any) -> Tensor:
        if self.training:
            self.await_save()
            if self.pipe.steps_done + 1 == self.at:
                failpoints.reset_calls()
                os.environ[FAILPOINT] = self.fault
            if self.pipe.steps_done + 1 == self.signal_at and hw.rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.pipe.steps_done + 1 == self.signal_at:
                wait_until(lambda: current().agreement.decided, "all ranks agree to stop", interval_s=0.001)
        return super().step(batch)

    def await_save(self) -> None:
        checkpointer = self.pipe._state.checkpointer
        assert checkpointer is not None
        pending, save = checkpointer.saver._pending, checkpointer._last_save
        if pending is not None and pending.exception(60) is not None and save.scheduled and not save.failed:
            agreed = current().agreements["save"]
            wait_until(lambda: agreed.decided, "all ranks know that the save failed", interval_s=0.001)
            os.environ.pop(FAILPOINT, None)  # a new writer process counts from one again


@pytest.fixture(autouse=True)
def no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "nowhere:sleep=0")
    monkeypatch.delenv(FAILPOINT)


def on_disk(pipe: Pipeline) -> list[int]:
    return list_steps(pipe.directory.checkpoints_dir)


@alone
@WAYS
def test_a_save_that_fails_at_any_point_loses_no_interval(background: bool, tmp_path: Path) -> None:
    """Killed in the step before the next save; what is lost are the steps since the retry."""
    assert len(POINTS) > 12
    for number, point in enumerate(POINTS if FULL or not background else POINTS[::6]):
        fault = faults.at(point, action="errno=EIO" if number % 3 or background else "errno=ENOSPC")
        pipe = make(tmp_path / point, Faulty(fault.text, cut=2 * EVERY), every=EVERY, background=background)
        with pytest.raises(Cut):
            pipe.run()
        os.environ.pop(FAILPOINT, None)
        assert on_disk(pipe)[-1] in (EVERY, EVERY + 1), (point, on_disk(pipe))
        assert pipe.steps_done - on_disk(pipe)[-1] <= EVERY, point


class FaultyJudged(Faulty):
    def val_step(self, batch: Any) -> None:
        self.log("score", (3.0, 1.0, 2.0, 2.5)[self.epoch], weight=len(batch[0]))


@alone
def test_a_best_value_whose_save_failed_is_not_the_best(tmp_path: Path) -> None:
    """Saved again after the next step, that checkpoint has no score; so the third score is the best that is saved."""
    fault = faults.at("checkpoint.mid_file", action="errno=EIO")
    stage = FaultyJudged(fault.text, at=22)
    pipe = make(tmp_path, stage, every="1h", keep_best="val/score", background=False, max_epochs=4)
    pipe.run()
    assert on_disk(pipe) == [23, 33, 44]
    assert hw.checkpoint.load_best(pipe.directory).metrics["val/score"] == 2.0


@alone
@pytest.mark.parametrize(
    ("background", "end", "point"),
    [
        (False, "stop", "checkpoint.mid_file"),
        (True, "stop", "checkpoint.after_rename"),
        (True, "finish", "checkpoint.rank_written"),
        (False, "finish", "checkpoint.committed"),
    ],
)
def test_the_last_save_is_repeated(background: bool, point: str, end: str, tmp_path: Path) -> None:
    """Nothing comes after it. One that failed when it was committed is not written again."""
    last = 7 if end == "stop" else 11
    stage = Faulty(faults.at(point, action="errno=EIO").text, at=last, signal_at=7 if end == "stop" else None)
    pipe = make(tmp_path, stage, every="1h", background=background, max_epochs=1)
    if end == "stop":
        with pytest.raises(Stopped, match="after step 7, with a checkpoint"):
            pipe.run()
    else:
        pipe.run()
    assert on_disk(pipe) == [0, last]


class LastOfThree(Traced):
    """The third scheduled save in a row fails in the background, just when the run stops or ends."""

    def __init__(self, *, stops: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.stops = stops

    def step(self, batch: Any) -> Tensor:
        if self.training and self.pipe.steps_done == 2 * EVERY:
            checkpointer = self.pipe._state.checkpointer
            assert checkpointer is not None and checkpointer._last_save.scheduled
            failed: Future[Any] = Future()
            failed.set_exception(StorageError("no space left"))
            checkpointer.saver._pending, checkpointer._failures = failed, MAX_FAILURES - 1
            if self.stops:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: current().agreement.decided, "the stop is decided", interval_s=0.001)
        return super().step(batch)


@alone
@pytest.mark.parametrize("stops", [False, True], ids=["finish", "stop"])
def test_the_last_save_is_tried_after_three_have_failed(stops: bool, tmp_path: Path) -> None:
    """Nothing comes after it, and there may be space again."""
    pipe = make(tmp_path, LastOfThree(stops=stops), every=EVERY, max_epochs=1)
    with pytest.raises(Stopped, match="after step 11, with a checkpoint") if stops else nullcontext():
        pipe.run()
    assert on_disk(pipe)[-1] == 11


@alone
def test_a_stop_that_cannot_save_says_so(tmp_path: Path) -> None:
    """The disk stays full: what was asked for, what is missing, and what there is."""
    fault = ",".join(
        faults.at("checkpoint.before_directory", nth=nth, action="errno=ENOSPC").text for nth in range(1, 9)
    )
    pipe = make(tmp_path, Faulty(fault, at=7, signal_at=7), every=EVERY)
    words = (
        r"stopped by SIGTERM after step 7, without a checkpoint of that step: .*No space left.*; "
        r"the newest checkpoint is that of step 5, written \d+s ago"
    )
    with pytest.raises(StorageError, match=words):
        pipe.run()
    assert pipe.directory.info()["attempts"][-1]["exit_code"] == StorageError.exit_code


@ranks(2)
def test_the_writer_of_one_rank_is_killed(tmp_path: Path) -> None:
    """All ranks repeat the save at the same step."""
    fault = faults.at("checkpoint.rank_written", rank=1, action="kill9").text
    pipe = make(tmp_path, Faulty(fault, cut=2 * EVERY), every=EVERY, background=True)
    with pytest.raises(Cut):
        pipe.run()
    hw.barrier()
    assert on_disk(pipe) == [0, EVERY + 1]


@alone
def test_a_save_whose_row_cannot_be_written_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock cannot be listed for a moment, on rank 0 alone, which would repeat the save alone."""
    usual = Reporter.record_checkpoint

    def unlisted(_: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def record(reporter: Reporter, saved: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "_newest", unlisted)
            usual(reporter, saved)

    monkeypatch.setattr(Reporter, "record_checkpoint", record)
    pipe = make(tmp_path, Traced(), every=EVERY, max_epochs=1)
    pipe.run()
    assert on_disk(pipe) == [EVERY, 2 * EVERY, 11]


@alone
def test_the_age_of_the_newest_checkpoint_is_known(tmp_path: Path) -> None:
    pipe = make(tmp_path, Traced(cut=8, log_every=2), every=EVERY)
    with pytest.raises(Cut):
        pipe.run()
    rows = pipe.directory.metrics_file(0).read_text()
    assert rows.count('"checkpoint_age_seconds":') == rows.count('"kind": "train"') >= 3
    assert '"checkpoint_age_seconds": null' not in rows
    assert pipe._state.checkpointer is not None and pipe._state.checkpointer.checkpoint_age_s is not None
    again = make(tmp_path, Traced(cut=6), every=EVERY)
    os.utime(pipe.directory.checkpoint_dir(5), (1, 1))
    with pytest.raises(Cut):
        again.run()
    assert (
        again._state.checkpointer is not None and (again._state.checkpointer.checkpoint_age_s or 0) > 1e6
    ), "that of the file"
