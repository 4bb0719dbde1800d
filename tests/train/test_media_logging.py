"""What a stage logs beside numbers: kept by a real run, equal after a resume, and not on the way of a step."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overhead import Operations
from torch import Tensor
from toys import Batches, Classify, make_pipe

from headway.errors import Stopped
from headway.record.media import read_histogram, read_media
from headway.run import Run, find_latest
from headway.testing import ranks
from headway.train import Stage


class Shows(Classify):
    def __init__(self, fail_at: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.fail_at = fail_at

    def step(self, batch: Any) -> Tensor:
        if self.training and self.steps_done == self.fail_at:
            raise ValueError("a bug")
        x, _ = batch
        weight = self.pipe.registered_models["net"].bare.first.weight
        if not self.training or self.steps_done % 3 == 0:
            self.log_image("x", x, caption=f"{self.epoch}")
            self.log_histogram("first", weight)
            self.log_text("sum", weight.double().sum().item().hex())
        return super().step(batch)

    def post_epoch(self) -> None:
        self.log_text("epoch", f"{self.epoch}")


def run(folder: Path, stage: Stage, **saving: Any) -> Run:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(10))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(stage, max_epochs=3, name="toy")
    pipe.enable_checkpointing(folder, **saving)
    return pipe.run()


def shown(run: Run) -> list[tuple[Any, ...]]:
    """All that is kept, with the bytes of the files."""
    return [
        (item.step, item.name, item.number, item.kind, item.epoch, item.caption, item.path(run).read_bytes())
        for item in read_media(run)
    ]


@pytest.mark.usefixtures("alone")
def test_a_run_that_failed_and_resumed_keeps_what_an_uninterrupted_one_keeps(tmp_path: Path) -> None:
    whole = shown(run(tmp_path / "whole", Shows(), every="4 steps"))
    names = Counter(name for _, name, *_ in whole)
    assert names == Counter(
        {"train/x": 10, "train/first": 10, "train/sum": 10, "train/epoch": 3}
        | {"val/x": 6, "val/first": 6, "val/sum": 6}
    )
    assert {(step, number) for step, name, number, *_ in whole if name == "val/x"} == {
        (step, number) for step in (10, 20, 30) for number in (0, 1)
    }
    for fail_at in (19, 10):  # before a validation, and right after one
        with pytest.raises(ValueError, match="a bug"):
            run(tmp_path / f"failed-{fail_at}", Shows(fail_at=fail_at), every="4 steps")
        resumed = run(tmp_path / f"failed-{fail_at}", Shows(), every="4 steps")
        assert len(resumed.info()["attempts"]) == 2
        assert shown(resumed) == whole


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_item_has_the_step_of_the_loss_beside_it(accumulate: int, tmp_path: Path) -> None:
    class Own(Stage):
        def run_epoch(self) -> None:
            for number, _ in enumerate(self.batches()):
                self.log("own", float(number))
                self.log_text("own", f"{number}")
                if number == 1:
                    break
            for _ in self.batches("val"):
                self.log_text("own", "val")
            self.log_text("own", "end")

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(6))
    pipe.register_dataset("val", Batches(2))
    managed = Shows(log_every=1, accumulate=accumulate)
    pipe.append_stage(managed, max_epochs=1, name="managed")
    pipe.append_stage(Own(log_every=1), max_epochs=1, name="own")
    kept = pipe.run()
    steps = 6 // accumulate
    found = [(item.name, item.step) for item in read_media(kept) if item.name.endswith(("/x", "/epoch"))]
    train = [1, 4] if accumulate == 1 else [1, 1]
    assert sorted(found) == [
        ("train/epoch", steps),
        *(("train/x", step) for step in train),
        ("val/x", steps),
        ("val/x", steps),
    ]
    own = [
        (item.step - steps, item.path(kept).read_text()) for item in read_media(kept) if item.name == "own"
    ]
    assert own == [(1, "0"), (2, "1"), (3, "val"), (4, "val"), (4, "end")]


@pytest.mark.usefixtures("alone")
def test_what_is_logged_costs_a_step_one_copy_and_nothing_where_it_is_not_kept(tmp_path: Path) -> None:
    """Of a tensor in the host's memory a step makes a copy; all else happens in another thread."""
    operations: dict[str, Counter[str]] = {}

    class Counts(Classify):
        def step(self, batch: Any) -> Tensor:
            image = torch.rand(3, 4, 4)
            for name, log in (
                ("image", lambda: self.log_image("x", image)),
                ("histogram", lambda: self.log_histogram("h", image)),
                ("text", lambda: self.log_text("t", "x")),
            ):
                with Operations() as seen:
                    log()
                operations.setdefault(name, Counter()).update(seen.seen)
            return super().step(batch)

    for ranks_kept, copies in (((0,), 5), ((1,), 0)):
        operations.clear()
        pipe = make_pipe(tmp_path)
        pipe.register_dataset("train", Batches(5))
        pipe.append_stage(Counts(), max_epochs=1)
        pipe.set_media(ranks=ranks_kept)
        kept = read_media(pipe.run())
        assert len(kept) == 3 * copies
        taken = (
            Counter({"aten.clone.default": copies, "aten.detach.default": copies}) if copies else Counter()
        )
        assert operations == {"image": taken, "histogram": taken, "text": Counter()}


@ranks(2)
def test_rank_0_keeps_unless_all_are_asked_to(tmp_path: Path) -> None:
    for asked, expected in (((0,), {0}), ("all", {0, 1})):
        pipe = make_pipe(tmp_path / str(asked))
        pipe.register_dataset("train", Batches(4))
        pipe.append_stage(Shows(), max_epochs=1)
        pipe.set_media(ranks=asked)
        kept = pipe.run()
        torch.distributed.barrier()
        assert {item.rank for item in read_media(kept)} == expected


@pytest.mark.usefixtures("alone")
def test_an_evaluation_keeps_nothing(tmp_path: Path) -> None:
    run(tmp_path, Shows(), every="1 epoch")
    found = find_latest(tmp_path, name="toy")
    assert found is not None
    before = shown(found)
    pipe = make_pipe(tmp_path)
    pipe.validate(Shows(), Batches(2))
    assert shown(found) == before


@pytest.mark.usefixtures("alone")
def test_a_run_that_stopped_within_a_validation_repeats_its_media_and_keeps_them_once(tmp_path: Path) -> None:
    whole = shown(run(tmp_path / "whole", Shows(), every="1 epoch"))

    class StopsInValidation(Shows):
        def val_step(self, batch: Any) -> Any:
            if self.steps_done == 20:
                signal.raise_signal(signal.SIGTERM)
            return super().val_step(batch)

    with pytest.raises(Stopped):
        run(tmp_path / "stopped", StopsInValidation(), every="1 epoch")
    resumed = run(tmp_path / "stopped", Shows(), every="1 epoch")
    assert len(resumed.info()["attempts"]) == 2
    assert shown(resumed) == whole


class Arranged(Stage):
    def run_epoch(self) -> None:
        for _ in self.batches("train"):
            self.log_image("row", torch.zeros(4, 3, 8, 8), columns=4)
            self.log_image("noise", torch.rand(3, 32, 32))
            self.log_histogram("counts", torch.arange(10.0), bins=5)


@pytest.mark.usefixtures("alone")
def test_the_options_of_what_is_logged_arrive(tmp_path: Path) -> None:
    """Both those of a call and those of all calls: 20 images of noise have 60 kB, and 12 may stay."""
    pytest.importorskip("PIL")
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(20))
    pipe.append_stage(Arranged(), max_epochs=1)
    pipe.set_media(max_gb=12e-6, format="jpeg")
    kept = read_media(made := pipe.run())
    rows = [item for item in kept if item.name == "row"]
    assert rows and {item.height for item in rows} == {8} and all(item.file.endswith(".jpg") for item in rows)
    histogram = read_histogram(next(item.path(made) for item in kept if item.name == "counts"))
    assert histogram is not None and len(histogram["counts"]) == 5
    assert sum(item.bytes for item in kept) <= 12_000
