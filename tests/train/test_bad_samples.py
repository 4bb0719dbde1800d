"""Bad samples in a run: counted over all ranks at log points, and left out of the mean of a validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import FEATURES, make_pipe

import headway as hw
from headway.errors import HeadwayError
from headway.testing import ranks


class Mean(hw.TrainValStage):
    """Its validation loss is the mean of the labels."""

    def step(self, batch: dict[str, Any]) -> Tensor:
        label = batch["cls"].double()
        out = self.models["net"](torch.zeros(len(label), FEATURES))
        return out.mean() + label.mean() if self.training else label.mean()


def shards(folder: Path, bad: set[int], count: int) -> Path:
    if hw.is_root():
        hw.data.pack([{"__key__": f"{n:03d}", "cls": "x" if n in bad else n} for n in range(count)], folder)
    hw.barrier()
    return folder


class Unprefixed(Mean):
    def val_metric_prefix(self) -> str:
        return ""


@ranks(2)
def test_a_rank_without_a_sample_counts_its_bad_ones(tmp_path: Path) -> None:
    """It logs that there are none of them, and nothing else."""
    where = Path(hw.broadcast_object(str(tmp_path)))
    pipe = make_pipe(where / "run")
    for name, count in (("train", 40), ("val", 1)):
        loader = hw.data.ShardLoader(shards(where / name, set(), count), batch_size=10, shuffle=False)
        pipe.register_dataset(name, loader)
    pipe.append_stage(Unprefixed(), max_epochs=1)
    pipe.run()
    (epoch,) = pipe.history.epochs
    assert (epoch.values["loss"], epoch.values["data/val/bad"]) == (0, 0)


@ranks(2)
def test_ranks_count_their_bad_samples_together(tmp_path: Path) -> None:
    where = Path(hw.broadcast_object(str(tmp_path)))
    bad = {0, 3, 4, 30}
    pipe = make_pipe(where / "fine")
    few = hw.data.ShardLoader(shards(where / "few", {5}, 400), batch_size=20, tail="drop")
    val = hw.data.ShardLoader(shards(where / "val", bad, 31), batch_size=3, shuffle=False, max_bad=0.5)
    pipe.register_dataset("train", few)
    pipe.register_dataset("val", val)
    pipe.append_stage(Mean(log_every=5), max_epochs=1)
    pipe.run()
    good = [n for n in range(31) if n not in bad]
    (epoch,) = pipe.history.epochs
    assert epoch.values["val/loss"] == pytest.approx(sum(good) / len(good), abs=1e-12)
    assert (epoch.values["data/train/bad"], epoch.values["data/val/bad"]) == (1, 4)

    pipe = make_pipe(where / "stopped")
    many = hw.data.ShardLoader(
        shards(where / "many", set(range(0, 400, 29)), 400), batch_size=20, tail="drop"
    )
    pipe.register_dataset("train", many)
    pipe.append_stage(Mean(log_every=5), max_epochs=1)
    with pytest.raises(HeadwayError, match=r"1\d of \d+ samples could not be used, more than max_bad=0.001"):
        pipe.run()
    assert pipe.steps_done % 5 == 0, "at a log point"
    assert max(hw.all_gather_object(len(many.bad))) < 10, "which none of them would have refused alone"
