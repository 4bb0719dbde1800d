"""Asked to stop, all ranks stop at one point, with a checkpoint; and go on as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_resume import Traced, assert_same, make, seeded, weights
from torch import Tensor

import headway as hw
from headway.dist.group import current
from headway.errors import Stopped
from headway.testing import ranks

alone = pytest.mark.usefixtures("alone")


class Signalled(Traced):
    """Some ranks get a signal in some step of training or validation."""

    def __init__(self, *, number: int, who: tuple[int, ...], at: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.number, self.who, self.at = number, who, at

    def step(self, batch: Any) -> Tensor:
        here = self.pipe.step + 1 if self.training else ("val", self.pipe.step)
        if here == self.at and hw.rank() in self.who:
            os.kill(os.getpid(), self.number)
            while not current().agreement.decided:  # threads talk; this machine may be busy
                time.sleep(0.001)
        return super().step(batch)


def stop_and_go_on(folder: Path, number: int, who: tuple[int, ...], at: Any) -> int:
    """Returns the step at which all ranks stopped."""
    whole = Traced(log_every=1000)
    golden = seeded(make(folder / "golden", whole, every="1h"))
    golden.run()
    first = Signalled(number=number, who=who, at=at, log_every=1000)
    pipe = seeded(make(folder / "cut", first, every="1h"))
    with pytest.raises(Stopped, match="with a checkpoint: the same command goes on"):
        pipe.run()
    stopped = hw.all_gather_object(pipe.step)
    assert len(set(stopped)) == 1, "all at the same step"
    assert (pipe.directory.checkpoint_dir(pipe.step) / "manifest.json").exists()
    second = Traced(log_every=1000)
    again = make(folder / "cut", second, every="1h")
    again.run()
    assert first.by_step | second.by_step == whole.by_step
    assert not set(first.by_step) & set(second.by_step), "no step twice"
    assert_same(weights(again), weights(golden))
    assert again.history["val/loss"] == golden.history["val/loss"]
    hw.barrier()
    attempts = again.directory.info()["attempts"]
    assert [(each["status"], each["exit_code"]) for each in attempts] == [("stopped", 75), ("done", 0)]
    assert [(each["step_started"], each["step_ended"]) for each in attempts] == [
        (0, pipe.step),
        (pipe.step, 33),
    ]
    return stopped[0]


@alone
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step(number: int, tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, number, (0,), 5) == 5  # log points are a thousand steps apart


@ranks(2)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_all_ranks_stop_at_the_same_step(who: tuple[int, ...], tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, signal.SIGUSR1, who, 5) in (5, 6)


@alone
def test_in_a_validation(tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, signal.SIGTERM, (0,), ("val", 11)) == 11
