"""Ranks whose mixes have different weights lose samples and see others twice: a log point ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import sgd

import headway as hw
from headway.data import Mix, ShardLoader, pack
from headway.errors import UsageError
from headway.testing import ranks


class Mixed(hw.TrainValStage):
    def __init__(self, changing: set[int], **settings: Any) -> None:
        super().__init__(**settings)
        self.changing = changing

    def step(self, batch: Any) -> Tensor:
        if self.steps_done == 5 and hw.rank() in self.changing:
            self.datasets["train"].set_weight("a", 3.0)  # type: ignore[attr-defined]
        loss: Tensor = self.models["net"](torch.ones(len(batch["__key__"]), 2)).square().mean()
        return loss


def run(root: Path, changing: set[int], **given: Any) -> hw.Pipeline:
    for name in ("a", "b") if hw.is_root() else ():
        pack([{"__key__": f"{n:02d}", "n.txt": str(n)} for n in range(40)], root / name)
    hw.barrier()
    mix = Mix({"a": 1.0, "b": 1.0}, shards={"a": root / "a", "b": root / "b"})
    pipe = hw.Pipeline(name="mixed", root=root / "runs")
    pipe.register_model("net", nn.Linear(2, 1))
    pipe.register_optimizer("sgd", sgd, model="net")
    pipe.register_dataset("train", ShardLoader(mix, batch_size=4, **given))
    pipe.append_stage(Mixed(changing, log_every=4), max_steps=12)
    pipe.run()
    return pipe


@ranks(3)
def test_weights_that_one_rank_changes_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        run(tmp_path, {1})
    assert str(error.value) == (
        "at step 6, the weights of dataset 'train' on rank 1 differ from those on rank 0, so that samples are lost and "
        "others come twice: call set_weights on all ranks after the same step, with the same weights"
    )


@ranks(3)
def test_weights_that_all_ranks_change_do_not(tmp_path: Path) -> None:
    assert run(tmp_path, {0, 1, 2}).steps_done == 12


@ranks(3)
def test_ranks_with_streams_of_their_own_need_not_agree(tmp_path: Path) -> None:
    assert run(tmp_path, {1}, rank=0, world_size=1).steps_done == 12
