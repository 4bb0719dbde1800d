"""Which run is gone on with, when a save is made, which are kept, and when to give up."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import Cut, Traced, assert_same, dataset, make, seeded, weights
from torch import Tensor, nn
from toys import Net, make_net, sgd

import headway as hw
from headway import dist
from headway.checkpoint import retention
from headway.checkpoint.settings import CheckpointSettings
from headway.dist import group
from headway.dist.control import failure_handler
from headway.errors import (
    HeadwayError,
    NoProgress,
    NoValidCheckpoint,
    RunLocked,
    StorageError,
    UsageError,
)
from headway.launcher import sweep
from headway.record.sinks import Csv
from headway.run import Run
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage
from headway.train.resume import state

alone = pytest.mark.usefixtures("alone")


def saved(pipe: Pipeline) -> list[int]:
    """The steps that have a checkpoint."""
    names = sorted(path.name for path in pipe.directory.checkpoints_dir.glob("step-????????????"))
    return [int(name.removeprefix("step-")) for name in names]


def rows(pipe: Pipeline, kind: str) -> list[dict[str, Any]]:
    lines = pipe.directory.metrics_file(0).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def cut(folder: Path, at: Any, **options: Any) -> Pipeline:
    """A run that was cut off."""
    pipe = seeded(make(folder, Traced(cut=at), **options))
    with pytest.raises(Cut):
        pipe.run()
    return pipe


# --- settings


def test_an_interval_that_is_not_valid_is_refused() -> None:
    with pytest.raises(UsageError, match="every='often' is not a valid interval"):
        CheckpointSettings(every="often")


def test_the_best_is_the_least_or_the_largest() -> None:
    least, most = CheckpointSettings(keep_best="val/loss"), CheckpointSettings(keep_best="max:val/accuracy")
    assert most.better({"val/accuracy": float("inf")}, 1.0) is None, "no manifest has it"
    assert (least.retention.keep_best, least.retention.best) == ("val/loss", "min")
    assert (most.retention.keep_best, most.retention.best) == ("val/accuracy", "max")
    assert least.better({"val/loss": 0.5}, 0.6) == 0.5
    assert least.better({"val/loss": 0.7}, 0.6) is None
    assert most.better({"val/accuracy": 0.7}, 0.6) == 0.7
    assert most.better({"val/accuracy": 0.5}, 0.6) is None
    assert least.better({"val/loss": float("nan")}, None) is None
    assert least.better({"other": 1.0}, None) is None
    with pytest.raises(UsageError, match="give a metric such as"):
        CheckpointSettings(keep_best="best:val/loss")


@alone
def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'evry' is not a valid setting of enable_checkpointing"):
        Pipeline(root=tmp_path).enable_checkpointing(evry=3)  # type: ignore[call-arg]


# --- when and what


@alone
def test_by_steps_with_the_first_and_the_last(tmp_path: Path) -> None:
    pipe = make(tmp_path, Traced(), every=10, background=True)
    pipe.run()
    assert [row["step"] for row in rows(pipe, "checkpoint")] == [0, 10, 20, 30, 33]
    assert saved(pipe) == [20, 30, 33]
    assert all(row["stall_seconds"] > 0 and row["bytes"] > 1000 for row in rows(pipe, "checkpoint"))
    assert any("checkpoint" in row["seconds"] for row in rows(pipe, "train"))


@alone
def test_by_epochs(tmp_path: Path) -> None:
    pipe = make(tmp_path, Traced(), every="2ep")
    pipe.run()
    assert [row["step"] for row in rows(pipe, "checkpoint")] == [0, 22, 33]


@ranks(2)
def test_by_time_rank_0_says_when_and_all_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0's clock counts: that of rank 1 runs a thousand times as fast."""
    from headway.train.resume import checkpointer

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now if hw.rank() == 0 else 1000 * self.now

    clock = Clock()
    monkeypatch.setattr(checkpointer, "time", clock)

    class Slow(Traced):
        def step(self, batch: Any) -> Tensor:
            clock.now += 1 if self.training else 0
            return super().step(batch)

    pipe = make(tmp_path, Slow(log_every=2), every="7s")
    pipe.run()
    hw.barrier()
    # due after 7 s, seen at the next log point (2, 4, 6, ...; also the end of an epoch), then 7 s from there
    assert [row["step"] for row in rows(pipe, "checkpoint")] == [0, 8, 16, 24, 32, 33]


class Judged(Traced):
    """A validation metric that the test decides."""

    values = (3.0, 1.0, 2.0, 2.5)

    def val_step(self, batch: Any) -> None:
        self.log("score", self.values[self.epoch], weight=len(batch[0]))


@alone
@pytest.mark.parametrize(
    ("best", "every", "kept", "others"),
    [
        ("val/score", 6, 22, [24, 30, 33]),
        ("max:val/score", 6, 11, [24, 30, 33]),
        (
            "val/score",
            11,
            22,
            [11, 33],
        ),  # due at the last step of an epoch: the save waits for the validation
    ],
)
def test_the_best_stays(best: str, every: int, kept: int, others: list[int], tmp_path: Path) -> None:
    pipe = make(tmp_path, Judged(), every=every, keep_best=best)
    pipe.run()
    assert saved(pipe) == sorted({kept, *others})
    manifest = json.loads((pipe.directory.checkpoint_dir(kept) / "manifest.json").read_text())
    assert manifest["metrics"]["val/score"] == (1.0 if kept == 22 else 3.0)


@alone
def test_the_best_is_remembered_over_a_restart(tmp_path: Path) -> None:
    for at in (25, None):
        pipe = make(tmp_path, Judged(cut=at), every=12, keep_best="val/score", max_epochs=4)
        with pytest.raises(Cut) if at else nullcontext():
            pipe.run()
    steps = [row["step"] for row in rows(pipe, "checkpoint")]
    assert steps == [0, 11, 12, 22, 24, 36, 44], "the score after 33 steps is no better than the one after 22"
    assert saved(pipe) == [22, 24, 36, 44]


class Scored(Judged):
    """Two metrics of each validation, one of which has larger values."""

    def val_step(self, batch: Any) -> None:
        super().val_step(batch)
        self.log("other", 20 + self.values[self.epoch], weight=len(batch[0]))


@alone
def test_the_best_of_another_metric_is_not_remembered(tmp_path: Path) -> None:
    for at, metric in ((25, "val/score"), (None, "val/other")):
        pipe = make(tmp_path, Scored(cut=at), every=12, keep_best=metric, max_epochs=4)
        with pytest.raises(Cut) if at else nullcontext():
            pipe.run()
    steps = [row["step"] for row in rows(pipe, "checkpoint")]
    assert steps == [0, 11, 12, 22, 24, 33, 36, 44], "the first value of a new metric is the best so far"


@alone
def test_the_best_of_another_run_is_not_that_of_a_new_one(tmp_path: Path) -> None:
    parent = make(tmp_path, Judged(), every="1h", keep_best="val/score", max_epochs=2)
    parent.run()
    chosen = parent.directory.checkpoint_dir(22)
    child = make(tmp_path, Judged(), every="1h", keep_best="val/score", max_epochs=4, resume=str(chosen))
    child.run()
    assert child.directory != parent.directory
    assert saved(child) == [23, 33, 44], "its first step; the best score of this run, 2.0; its end"
    assert hw.checkpoint.load_best(child.directory).step == 33


class Solved:
    """A metric that computes whether something is the case."""

    def compute(self) -> Tensor:
        return torch.tensor(True)

    def reset(self) -> None:
        pass


@alone
def test_a_metric_that_is_true_or_false_is_a_number(tmp_path: Path) -> None:
    stage = Traced()
    stage.add_metric("val/solved", Solved())
    pipe = make(tmp_path, stage, every="1 epoch", keep_best="max:val/solved", max_epochs=1)
    pipe.run()
    assert hw.checkpoint.load_best(pipe.directory).metrics["val/solved"] == 1.0


@alone
def test_what_cannot_be_pruned_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A manifest that may not be read, or a file system that fails for a while; saves go on."""

    def refuse(parent: Path) -> None:
        raise StorageError(f"manifest.json in {parent} cannot be read: Permission denied")

    monkeypatch.setattr(retention, "read_manifests", refuse)
    pipe = make(tmp_path, Traced(), every=3, max_epochs=1)
    pipe.run()
    assert saved(pipe) == [0, 3, 6, 9, 11]
    assert "old checkpoints were not removed: manifest.json in" in capfd.readouterr().err


@alone
def test_the_one_gone_on_from_stays_until_two_newer_exist(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Look(Callback):
        def log_point(self, stage: Any, *_: Any) -> None:
            seen.append(saved(stage.pipe))

    first = cut(tmp_path, 14, every=3)
    assert saved(first) == [6, 9, 12]
    pipe = make(tmp_path, Traced(log_every=1), every=3)
    pipe.add_callback(Look())
    pipe.run()
    for steps in seen:
        assert 12 in steps or len([step for step in steps if step > 12]) >= 2


# --- what is not saved


@alone
def test_spoilt_weights_are_never_saved(tmp_path: Path) -> None:
    class Spoilt(Traced):
        def optimize(self) -> None:
            super().optimize()
            if (
                self.pipe.steps_done + 1 == 6
            ):  # the loss of step 6 was finite: nobody sees it before the next one
                with torch.no_grad():
                    next(iter(self.pipe.models["net"].parameters())).fill_(float("nan"))

    pipe = make(tmp_path, Spoilt(log_every=1000), every=3)
    with pytest.raises(HeadwayError, match="weights are non-finite after step 6 and are not saved"):
        pipe.run()
    assert saved(pipe) == [0, 3]


def test_a_rank_without_weights_takes_part_on_the_device_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP gives no row of a small model to some ranks; the collective of the others is on their device."""
    seen: list[torch.device] = []

    def gather(row: Tensor) -> Tensor:
        seen.append(row.device)
        return torch.zeros(1, 1)

    monkeypatch.setattr(state, "gather_rows", gather)
    pipe = SimpleNamespace(registered_models={}, device=torch.device("meta"))
    run = SimpleNamespace(pipe=pipe, steps_done=0)
    state.check_weights(run, from_root=False)  # type: ignore[arg-type]
    assert seen == [pipe.device]


@alone
def test_a_loss_that_is_not_finite_is_seen_before_a_save(tmp_path: Path) -> None:
    class Spoilt(Traced):
        def step(self, batch: Any) -> Tensor:
            loss = super().step(batch)
            return loss * float("nan") if self.pipe.steps_done + 1 == 5 else loss

    pipe = make(tmp_path, Spoilt(log_every=1000), every=3)
    with pytest.raises(HeadwayError, match="became non-finite at step 5"):
        pipe.run()
    assert saved(pipe) == [0, 3]


@alone
def test_a_save_that_fails_costs_no_run_and_three_in_a_row_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from headway.checkpoint import Saver

    original, calls = Saver.save, iter(range(100))
    failing: set[int] = {1, 3, 4}  # at step 6; and at step 12 with its retry

    def save(self: Saver, state: Any, **options: Any) -> None:
        if next(calls) in failing:
            raise StorageError("no space left")
        original(self, state, **options)

    monkeypatch.setattr(Saver, "save", save)
    make(tmp_path, Traced(), every=6).run()
    said = capfd.readouterr().err
    assert (
        "the save at step 6 failed, training continues: no space left; the newest checkpoint is that of"
        in said
    )
    assert re.search(r"of step 7, written \d+s ago", said), "the retry"
    calls, failing = iter(range(100)), {2, 3, 4, 5, 6}  # at step 12, 18 and 24, with retries
    pipe = make(tmp_path, Traced(), every=6)
    with pytest.raises(
        StorageError, match=r"no space left; the newest checkpoint is that of step 6, written \d+s ago"
    ):
        pipe.run()
    assert pipe.steps_done == 24


# --- which run


@alone
def test_a_finished_run_is_not_gone_on_with(tmp_path: Path) -> None:
    first = make(tmp_path, Traced())
    first.run()
    second = make(tmp_path, Traced())
    second.run()
    assert first.directory.id != second.directory.id


@alone
def test_a_run_that_never_got_to_its_first_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Early(Callback):
        def pre_run(self, pipe: Pipeline) -> None:  # noqa: ARG002
            raise Cut

    first = make(tmp_path, Traced())
    first.add_callback(Early())
    with pytest.raises(Cut):
        first.run()
    second = make(tmp_path, Traced(), max_epochs=1)
    second.run()
    assert second.directory == first.directory
    assert "has no checkpoint yet: starting from step 0" in capfd.readouterr().err


@alone
def test_after_the_end_there_is_nothing_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What follows in the script, such as writing the model to a file, gets what the run has made."""
    first = make(tmp_path, Traced(), ema=0.9)
    first.run()
    drawn = torch.rand(3)
    for way in ("path", "variable"):
        dist.leave()  # as another process
        if way == "variable":
            monkeypatch.setenv("HEADWAY_RUN", str(first.directory.path))
        torch.manual_seed(99)
        stage = Traced()
        pipe = make(tmp_path, stage, ema=0.9, resume=first.directory.path if way == "path" else "auto")
        assert pipe.run() == first.directory
        assert stage.by_step == {}
        said = capfd.readouterr().err
        assert said.count(f"{first.directory.id} is already finished") == 1
        assert "models, history and counters of step 33 are restored, and nothing is trained" in said
        assert_same(weights(pipe), weights(first))
        assert (pipe.steps_done, pipe.epoch, stage.epoch, stage.steps_done) == (33, 3, 3, 33)
        assert pipe.history["val/loss"] == first.history["val/loss"] != []
        assert torch.equal(torch.rand(3), drawn), "as if it had just ended"
    assert len(first.directory.info()["attempts"]) == 1
    dist.leave()
    shutil.rmtree(first.directory.checkpoints_dir)
    with pytest.raises(NoValidCheckpoint, match=r"is already finished .* but has no checkpoint to restore"):
        make(tmp_path, Traced(), ema=0.9).run()


class Registering(Callback):
    """Registers what is kept when the run begins, as some scripts do."""

    def __init__(self) -> None:
        self.queue = nn.Linear(2, 2)

    def pre_run(self, pipe: Pipeline) -> None:
        pipe.register_state("queue", self.queue)


@alone
def test_what_pre_run_registers_is_restored_in_a_finished_run(tmp_path: Path) -> None:
    first, again = Registering(), Registering()
    pipe = make(tmp_path, Traced())
    pipe.add_callback(first)
    run = pipe.run()
    dist.leave()  # as another process
    pipe = make(tmp_path, Traced(), resume=run.path)
    pipe.add_callback(again)
    assert pipe.run() == run
    assert_same(again.queue.state_dict(), first.queue.state_dict())


class SettingUp(Callback):
    """Registers all that is trained, and trained on, when the run begins, as Lightning's `setup` does."""

    def __init__(self, source: Pipeline, *, late: bool = False) -> None:
        self.source, self.late = source, late

    def pre_run(self, pipe: Pipeline) -> None:
        pipe.register_model("net", make_net())
        pipe.register_optimizer("sgd", sgd, model="net")
        pipe.register_dataset("train", self.source.datasets["train"])

    def pre_stage(self, stage: Stage) -> None:
        if self.late:
            stage.pipe.register_dataset("val", self.source.datasets["val"])


@alone
def test_what_pre_run_registers_is_trained_checked_and_resumed(tmp_path: Path) -> None:
    def set_up(stage: Stage, *, late: bool = False, folder: str = "runs") -> Pipeline:
        pipe = Pipeline(name="toy", root=tmp_path / folder)
        pipe.add_callback(SettingUp(make(tmp_path, Traced()), late=late))
        pipe.append_stage(stage, max_epochs=3, name="train")
        pipe.enable_checkpointing(every=3, background=False)
        return seeded(pipe)

    whole, first, second = Traced(val_every=None), Traced(cut=14, val_every=None), Traced(val_every=None)
    set_up(whole, folder="whole").run()
    with pytest.raises(Cut):
        set_up(first).run()
    set_up(second).run()
    assert first.by_step | second.by_step == whole.by_step and min(second.by_step) == 13
    with pytest.raises(UsageError, match="needs the dataset 'train'; registered: none"):
        pipe = set_up(Traced())
        pipe._state.callbacks = [Callback()]
        pipe.run()
    with pytest.raises(
        UsageError, match=r"dataset 'val' is registered in stage 'train', after .* in pre_run"
    ):
        pipe = set_up(Traced(), late=True)
        pipe.run()


@alone
def test_never_must_and_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no unfinished run 'toy' with these settings"):
        make(tmp_path, Traced(), resume="must").run()
    first = cut(tmp_path, 8)
    second = cut(tmp_path, 8, resume="never")
    assert first.directory.id != second.directory.id
    again = cut(tmp_path, 9, resume=first.directory.path)
    assert again.directory == first.directory
    newest = make(tmp_path, Traced(), resume="must")
    newest.run()
    assert newest.directory == second.directory, "the newest of the unfinished"
    with pytest.raises(UsageError, match='give "auto", "never", "must" or a run directory'):
        make(tmp_path, Traced(), resume=tmp_path / "nowhere").run()


@alone
def test_no_blank_line_is_between_the_attempts_in_the_ledger(tmp_path: Path) -> None:
    for at in (8, None):
        pipe = make(tmp_path, Traced(cut=at), max_epochs=1)
        pipe.enable_ledger()
        with pytest.raises(Cut) if at else nullcontext():
            pipe.run()
    rows = [json.loads(line) for line in pipe.directory.ledger_file.read_text().splitlines()]
    assert {row["attempt"] for row in rows if row["kind"] == "step"} == {1, 2}


@alone
def test_another_name_or_other_settings_are_another_run(tmp_path: Path) -> None:
    first = cut(tmp_path, 8)
    other = make(tmp_path, Traced(), max_epochs=1)
    other.config = {"lr": 2}
    other.run()
    assert other.directory.id != first.directory.id
    other = make(tmp_path, Traced(), max_epochs=1)
    other.name = "else"
    other.run()
    assert other.directory.name == "else"


def contents(run: Run) -> dict[Path, bytes]:
    """What is in a run directory, apart from what its ranks print and the beats of its owners."""
    files = (path for path in run.path.rglob("*") if path.is_file())
    return {
        path: path.read_bytes()
        for path in files
        if path.parent != run.lock_dir and path != run.log_file(0) and path.suffix != ".offset"
    }


def fail(error: BaseException) -> None:
    """Does what Python does with an exception that nothing caught, without the deadline that ends this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(failure_handler, "limit_exit", lambda *_, **__: None)
        group.current().failure_handler.on_exception(error, error.__traceback__)


@alone
def test_a_run_that_somebody_trains_in_is_left_alone(tmp_path: Path) -> None:
    first = cut(tmp_path, 8)
    with first.directory.lock():
        second = make(tmp_path, Traced(), max_epochs=1)
        second.run()
        assert second.directory.id != first.directory.id
        before = contents(first.directory)
        with pytest.raises(RunLocked) as refused:
            make(tmp_path, Traced(), resume=first.directory.path).run()
        fail(refused.value)
        assert contents(first.directory) == before, "the next failure there would seem to be caused by this"


@alone
def test_a_run_that_was_taken_over_is_not_written_to(tmp_path: Path) -> None:
    before: dict[Path, bytes] = {}

    class Taken(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 4 and not before:  # another process has published the next number
                lock = self.pipe.directory.lock_dir
                (lock / "owner-00002.json").write_bytes((lock / "owner-00001.json").read_bytes())
                before.update(contents(self.pipe.directory))
            return super().step(batch)

    pipe = make(tmp_path, Taken(log_every=1))
    pipe.enable_ledger()
    pipe.add_sink(Csv())
    with pytest.raises(RunLocked, match="was taken over") as taken:
        pipe.run()
    fail(taken.value)
    assert saved(pipe) == [0, 3]
    after = contents(pipe.directory)
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not changed - {"metrics.csv", "sink-csv.txt"}, (
        "the sink gets the rows from before, and says why it ends"
    )
    assert pipe.steps_done == 5, "found at the first row"


@alone
def test_the_directory_that_the_job_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Run.create(tmp_path, name="submitted")
    monkeypatch.setenv("HEADWAY_RUN", str(given.path))
    assert cut(tmp_path / "elsewhere", 8).directory == given
    second = make(tmp_path, Traced(), max_epochs=1)
    second.run()
    assert second.directory.id != given.id, "for the first pipeline of a job"
    dist.leave()
    with pytest.raises(UsageError, match="has a checkpoint of step"):
        make(tmp_path, Traced(), resume="never").run()
    dist.leave()
    pipe = make(tmp_path, Traced())
    pipe.run()
    assert pipe.directory == given
    dist.leave()
    hw.init()
    assert dist.open_run("anywhere", name="other") == given
    monkeypatch.setenv("HEADWAY_RUN", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="is not a run directory"):
        make(tmp_path, Traced()).run()


@alone
def test_a_job_finds_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    runs = {}
    for job in ("7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        runs[job] = cut(tmp_path, 8, resume="never").directory
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    pipe = make(tmp_path, Traced())
    pipe.run()
    assert pipe.directory == runs["7"], "not the newest one, which is that of another job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    stage = Traced()
    assert make(tmp_path, stage).run() == runs["7"]
    assert not stage.by_step, "it is finished"
    monkeypatch.setenv("SLURM_JOB_ID", "9")  # an allocation in which somebody tries things out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    cut(tmp_path, 8, resume="never")
    for _ in range(2):
        make(tmp_path, stage := Traced(), max_epochs=3).run()
        assert stage.by_step, "finished in the same start of the job: that is no reason to do nothing"


# --- what is there when a run goes on


@alone
def test_damaged_checkpoints_are_passed_over_and_without_a_whole_one_nothing_starts(tmp_path: Path) -> None:
    first = cut(tmp_path, 14)
    assert saved(first) == [6, 9, 12]
    for step in (9, 12):
        state = first.directory.checkpoint_dir(step) / "state.json"
        state.write_bytes(state.read_bytes()[:-1])
    again = make(tmp_path, stage := Traced(cut=12))
    with pytest.raises(Cut):
        again.run()
    assert min(stage.by_step) == 7
    for step in saved(again):
        os.truncate(again.directory.checkpoint_dir(step) / "manifest.json", 10)
    with pytest.raises(NoValidCheckpoint, match="none is valid") as caught:
        make(tmp_path, Traced()).run()
    assert caught.value.exit_code == 86


@alone
@pytest.mark.parametrize("kept", ["nothing", "latest"])
def test_checkpoints_that_were_removed_are_missed(kept: str, tmp_path: Path) -> None:
    first = cut(tmp_path, 14).directory
    for path in list(first.checkpoints_dir.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
    if kept == "nothing":
        shutil.rmtree(first.checkpoints_dir)
    stage = Traced()
    for _ in range(2):
        with pytest.raises(
            NoValidCheckpoint, match=r"trained up to step 1[0-9], .* have been removed"
        ) as caught:
            make(tmp_path, Traced()).run()
        assert caught.value.exit_code == 86
    again = make(tmp_path, stage := Traced(), resume="never", max_epochs=1)
    again.run()
    assert again.directory != first
    assert min(stage.by_step) == 1


class Counted(Net):
    """Has a buffer that training changes, one that is constant, and neither is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


@alone
@pytest.mark.parametrize("kind", ["changing", "constant"])
def test_what_is_not_saved_is_named(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = dataset()
    if kind == "changing":
        samples.rng = np.random.default_rng(1)  # type: ignore[attr-defined]
    loader = hw.data.DataLoader(samples, global_batch_size=8, shuffle=True, seed=3)
    make(tmp_path, Traced(), model=Counted if kind == "changing" else None, loader=loader, max_epochs=1).run()
    said = capfd.readouterr().err
    assert (
        said.count("that are not persistent")
        == said.count("of its own (dataset.rng)")
        == (kind == "changing")
    )
    assert ("(net.seen)" in said) == (kind == "changing")


@alone
def test_hooks_are_told(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Callback):
        def resume_run(self, pipe: Pipeline) -> None:
            told.append(f"at step {pipe.steps_done}")

    for at in (8, None):
        pipe = make(tmp_path, Traced(cut=at))
        pipe.add_callback(Told())
        try:
            pipe.run()
        except Cut:
            assert told == []
    assert told == ["at step 6"]


class Counter:
    def __init__(self) -> None:
        self.seen = 0
        self.table = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.table = state["seen"], state["table"]


@alone
def test_objects_of_the_users_own(tmp_path: Path) -> None:
    class Counting(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.training:
                counter.seen += 1
                counter.table += 1
            return super().step(batch)

    for at in (8, None):
        counter = Counter()
        pipe = make(tmp_path, Counting(cut=at))
        pipe.register_state("counter", counter)
        try:
            pipe.run()
        except Cut:
            assert counter.seen == 8
    assert counter.seen == 33 and counter.table.tolist() == [33.0] * 3
    with pytest.raises(UsageError, match="register an object with state_dict"):
        pipe.register_state("number", 3)  # type: ignore[arg-type]


@alone
def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    cut(tmp_path, 8)
    pipe = make(tmp_path, Traced())
    pipe.register_model("more", torch.nn.Linear(1, 1))
    with pytest.raises(
        UsageError,
        match=r"no tensor 'models.more.weight' .* is it from another model\? \(to start a new run, pass resume",
    ):
        pipe.run()
    other = make(tmp_path, Traced())
    other.append_stage(Traced(), max_epochs=1, name="second")
    with pytest.raises(
        UsageError, match="the checkpoint has stages train, but the pipeline has second, train"
    ):
        other.run()


@alone
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_another_kind_of_optimiser_is_refused(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    cut(tmp_path, 8)
    pipe = make(tmp_path, Traced())
    (group,) = pipe.optimizers["sgd"].param_groups
    pipe.optimizers["sgd"] = kind(group["params"])
    said = f"optimizer 'sgd' was saved as SGD and is now {kind.__name__}: .* or start a new run"
    with pytest.raises(UsageError, match=said):
        pipe.run()


# --- when to give up


@alone
def test_three_attempts_without_a_new_step(tmp_path: Path) -> None:
    first = cut(tmp_path, 8)
    for _ in range(3):
        cut(tmp_path, 8)  # each begins at 6 and never gets to the save of 9
    with pytest.raises(NoProgress, match=r"3 attempts in a row made no progress beyond step 6") as caught:
        make(tmp_path, Traced()).run()
    assert caught.value.exit_code == 93
    with pytest.raises(
        NoProgress
    ) as again:  # a start that is refused is no attempt: the causes stay the same
        make(tmp_path, Traced()).run()
    assert str(again.value) == str(caught.value)
    pipe = make(tmp_path, Traced(), resume="must")
    pipe.run()
    assert pipe.directory == first.directory


@alone
def test_attempts_that_were_killed_are_told_from_those_that_failed(tmp_path: Path) -> None:
    first = cut(tmp_path, 8)
    for _ in range(3):
        cut(tmp_path, 8)
    run = first.directory
    info = run.info()
    for attempt in info["attempts"][1:]:
        attempt.update(status="lost", exit_code=None)
        run.old_failure_file(attempt["number"]).unlink(missing_ok=True)
    run.failure_file.unlink(missing_ok=True)
    (run.path / "run.json").write_text(json.dumps(info))
    with pytest.raises(NoProgress, match="attempt 4: was killed before it could record its end") as caught:
        make(tmp_path, Traced()).run()
    assert "None" not in str(caught.value)


@alone
def test_attempts_that_got_on_or_were_interrupted_do_not_count(tmp_path: Path) -> None:
    cut(tmp_path, 8)
    cut(tmp_path, 8)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, Interrupted()).run()
    cut(tmp_path, 8)
    cut(tmp_path, 11)
    cut(tmp_path, 11)
    make(tmp_path, Traced()).run()


@alone
def test_a_script_that_was_refused_has_not_tried(tmp_path: Path) -> None:
    first = cut(tmp_path, 8)
    for _ in range(4):
        pipe = make(tmp_path, Traced())
        pipe.register_model("more", torch.nn.Linear(1, 1))
        with pytest.raises(UsageError, match="from another model"):
            pipe.run()
    pipe = make(tmp_path, Traced())  # as it was
    pipe.run()
    assert pipe.directory == first.directory


class Interrupted(Traced):
    def step(self, _: Any) -> Tensor:
        raise KeyboardInterrupt


class ByHand(hw.Stage):
    """Steps in each iteration, or in every second one, with the gradients of both or of its own alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def run_epoch(self) -> None:
        for number, (x, y) in enumerate(self.batches("train")):
            updates = self.way == "each" or number % 2 == 1
            if number % 2 == 0 if self.way == "accumulated" else updates:
                self.pipe.optimizers["sgd"].zero_grad()
            if updates or self.way == "accumulated":
                (self.models["net"](x).flatten() - y).square().mean().backward()
            if updates:
                self.step_optimizer("sgd")  # its gradients stay until the next update


@alone
@pytest.mark.parametrize("way", ["each", "alternating", "accumulated"])
def test_a_save_within_an_accumulation_by_hand_is_said(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = hw.Pipeline(name="hand")
    pipe.register_model("net", nn.Linear(4, 1))
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.01), model="net")
    samples = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48))
    pipe.register_dataset("train", hw.data.DataLoader(samples, batch_size=8))
    pipe.append_stage(ByHand(way), max_epochs=2)
    pipe.enable_checkpointing(tmp_path, every=1, background=False)
    pipe.run()
    said = capfd.readouterr().err
    assert said.count("is within an accumulation: gradients of optimizer 'sgd' wait") == (
        way == "accumulated"
    )


@alone
@pytest.mark.parametrize(
    ("config", "warns"),
    [({"lr": 0.01}, True), (None, True), ({"o": {"lr": 0.001}}, False), ({"seed": 2}, False)],
)
def test_a_sweep_that_the_script_does_not_read_is_said(
    config: Any,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = Run.create(tmp_path, name="digits", world={})
    sweep.join([run], [{"lr": "1e-3", "seed": "2"}])
    monkeypatch.setenv("HEADWAY_RUN", str(run.path))
    pipe = hw.Pipeline(config=config, name="digits")
    pipe.register_model("net", Net())
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.01), model="net")
    pipe.register_dataset("train", hw.data.DataLoader(dataset(), global_batch_size=8))
    pipe.append_stage(Traced(), max_steps=1)
    pipe.enable_checkpointing(tmp_path)
    pipe.run()
    assert capfd.readouterr().err.count("none of the values of the sweep (lr=1e-3, seed=2)") == warns
