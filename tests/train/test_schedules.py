"""Learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import UsageError
from headway.testing import ranks
from headway.train import scale_lr, warmup_cosine


def rates(steps: int, **settings: float) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    scheduler = warmup_cosine(optimizer, **settings)  # type: ignore[arg-type]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_warm_up_then_cosine() -> None:
    found = rates(16, warmup=3, total=13, floor=0.1)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[8] == pytest.approx(1.1)  # half-way between 2.0 and 0.2
    assert found[13:] == pytest.approx([0.2] * 3)
    assert found[3:14] == sorted(found[3:14], reverse=True)


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="warmup=5 and total=5: give steps with 0 <= warmup < total"):
        rates(1, warmup=5, total=5)


@ranks(2)
def test_the_rate_grows_with_the_global_batch() -> None:
    assert scale_lr(0.1, batch_size=64, base_batch_size=32) == pytest.approx(0.4)
    assert scale_lr(0.1, batch_size=64, base_batch_size=32, rule="sqrt") == pytest.approx(0.2)
    with pytest.raises(UsageError, match='rule=\'cubic\' is unknown: use "linear" or "sqrt"'):
        scale_lr(0.1, batch_size=64, base_batch_size=32, rule="cubic")  # type: ignore[arg-type]
