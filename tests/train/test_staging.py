"""Batches in memory go to the device on a thread of their own, and a resumed run does not notice."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from toys import FEATURES, make_net, sgd

import headway as hw
from headway.data.feed import batch_mover
from headway.data.feed.device_feed import StagedBatch
from headway.train import loop_state

CUDA = torch.device("cuda")
LARGE = 2**15  # smaller batches are copied when they are needed, by the thread that trains


class CountingFeed:
    """A feed without a device: it marks what it was given, and notes the threads that gave it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def stage(self, batch: torch.Tensor) -> StagedBatch:
        self.threads.append(threading.current_thread().name)
        return StagedBatch(batch + 1000, cast(Any, None))


class Cut(Exception):
    """The run ends here, as if it had been killed."""


class Note(hw.TrainValStage):
    """Notes its batches; ends before the step with number `cut`."""

    def __init__(self, cut: int | None) -> None:
        super().__init__()
        self.cut, self.seen = cut, list[float]()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.cut == len(self.seen):
            raise Cut
        self.seen.append(float(batch[0]))
        return cast(torch.Tensor, self.models["net"](torch.randn(2, FEATURES))).sum()


@pytest.mark.usefixtures("alone")
def test_a_resumed_run_continues_with_the_batch_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, moving = CountingFeed(), batch_mover.moving
    monkeypatch.setattr(batch_mover, "shared_feed", lambda _: feed)
    monkeypatch.setattr(loop_state, "moving", lambda loader, _: moving(loader, CUDA))
    seen = list[float]()
    for cut in (3, 1, None):
        stage, pipe = Note(cut), hw.Pipeline(name="toy", root=tmp_path)
        pipe.register_model("net", make_net())
        pipe.register_optimizer("sgd", sgd, model="net")
        pipe.register_dataset("train", [torch.full((LARGE,), float(number)) for number in range(9)])
        pipe.append_stage(stage, max_epochs=1)
        pipe.enable_checkpointing(every=1, background=False)
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
        assert all(thread.name != "headway feed" for thread in threading.enumerate())
        seen += stage.seen
    assert seen == [1000.0 + number for number in range(9)]
    assert set(feed.threads) == {"headway feed"}, "and never the thread that trains"
