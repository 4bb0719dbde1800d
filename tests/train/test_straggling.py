"""A rank that is slower than the others is named, once, and only when it stays so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import warm

from headway.train.metrics.stragglers import Stragglers, busy

SCRIPT = """
import sys, time
import torch
import headway as hw

class Slow(hw.TrainValStage):
    def step(self, batch):
        if hw.rank() == 1 and self.pipe.steps_done >= 4:
            time.sleep(0.15)
        return self.models["net"](batch[0]).square().mean()

data = torch.utils.data.TensorDataset(torch.randn(96, 4))
pipe = hw.Pipeline(name="slow", root=sys.argv[1])
pipe.register_model("net", torch.nn.Linear(4, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1))
pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=2, shuffle=True))
pipe.append_stage(Slow(log_every=2), max_epochs=1)
pipe.run()
"""


def test_only_what_persists_is_told() -> None:
    stragglers = Stragglers()
    for _ in range(10):  # now this one, now that one
        assert stragglers.observe([1.0, 2.0, 1.0], whole=3.0) is None
        assert stragglers.observe([2.0, 1.0, 1.0], whole=3.0) is None
    assert [stragglers.observe([1.0, 1.0, 1.4], whole=3.0) for _ in range(2)] == [None, None]
    told = stragglers.observe([1.0, 1.0, 1.4], whole=3.0)
    assert told is not None and told.startswith("rank 2 is slower than the others") and "1.40 s" in told
    assert [stragglers.observe([1.0, 1.0, 1.4], whole=3.0) for _ in range(9)] == [None] * 9, "said once"
    for _ in range(9):  # near the limit, now above and now below
        assert stragglers.observe([1.0, 1.0, 1.2], whole=3.0) is None
        assert [stragglers.observe([1.0, 1.0, 1.4], whole=3.0) for _ in range(3)] == [None] * 3
    for _ in range(3):
        stragglers.observe([1.0, 1.0, 1.0], whole=3.0)
    again = [stragglers.observe([1.0, 1.0, 1.4], whole=3.0) for _ in range(3)]
    assert again[:2] == [None, None] and again[2] is not None, "and again when it comes back"


def test_one_step_that_stands_for_many_may_have_been_out_of_luck() -> None:
    stragglers = Stragglers()
    told = [stragglers.observe([1.0, 1.0, 1.4], whole=3.0, sampled=True) for _ in range(10)]
    assert told[:9] == [None] * 9
    assert told[9] is not None and "at 10 log points in a row" in told[9]


def test_of_two_ranks_the_slower_one_is_named() -> None:
    stragglers = Stragglers()
    assert [stragglers.observe([1.0, 1.2], whole=3.0) for _ in range(5)] == [None] * 5
    told = [stragglers.observe([1.4, 1.0], whole=3.0) for _ in range(3)]
    assert told[2] is not None and told[2].startswith("rank 0 is slower than the others")
    assert told[2].endswith("now 1.40 s against 1.00 s")


def test_steps_below_a_millisecond_count_when_they_have_cost_a_second() -> None:
    noise = Stragglers()
    assert [noise.observe([0.0021, 0.0004], whole=0.003) for _ in range(50)] == [None] * 50
    for _ in range(20):  # and a break in between begins the count again
        assert noise.observe([0.02, 0.02], whole=0.05) is None
        assert [noise.observe([0.04, 0.015], whole=0.05) for _ in range(39)] == [None] * 39
    brief = Stragglers()
    told = [brief.observe([0.056, 0.030], whole=0.06) for _ in range(45)]
    (line,) = [each for each in told if each is not None]
    assert line.startswith("rank 0 is slower than the others: at 39 log points in a row")
    assert line.endswith("now 56 ms against 30 ms")
    assert told[38] == line


def test_what_costs_nothing_is_not_worth_a_word() -> None:
    for times, whole in (
        ([0.01, 0.01, 0.05], 3.0),  # most of the time goes elsewhere
        ([1.0, 1.2, 1.0], 1.5),
        ([1.0], 1.0),
    ):
        stragglers = Stragglers()
        assert [stragglers.observe(times, whole=whole) for _ in range(5)] == [None] * 5


def test_waiting_for_others_is_not_being_busy() -> None:
    assert busy({"data": 1.0, "compute": 2.0, "backward": 4.0, "wait": 8.0}) == (3.0, 15.0)


def test_a_slow_rank_of_a_real_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "headway",
        "run",
        "--nproc",
        "3",
        str(tmp_path / "slow.py"),
        str(tmp_path / "runs"),
    ]
    done = warm.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.count("is slower than the others") == 1, text
    assert "rank 1 is slower than the others" in text
