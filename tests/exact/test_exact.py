"""A training that is killed and resumed is the one that was not, bit for bit, or its first saves say what differs.

Some variants of each class here; all of the table with HEADWAY_FAULTS=full.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torch import optim
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))

from table import judge
from variants import ALL, VARIANTS

FULL = os.environ.get("HEADWAY_FAULTS") == "full"
SOME = (
    "optimizers/adam-fused",
    "schedulers/one-cycle",
    "hooks/post-stage-draws",
    "models/batch-norm",
    "models/buffer-not-persistent",
    "loaders/torch-weighted",
    "python_state/registered-tensors",
    "python_state/stage-counter",
)
"""those of `make test`"""


@pytest.mark.parametrize("name", sorted(VARIANTS) if FULL else SOME)
def test_a_resumed_run_is_exact_or_says_so(name: str, tmp_path: Path) -> None:
    verdict = judge(name, VARIANTS[name], tmp_path)
    assert verdict.fits(VARIANTS[name]), verdict


def test_a_difference_that_nobody_names_is_found(tmp_path: Path) -> None:
    verdict = judge("silent", ALL["silent"], tmp_path)
    assert verdict.word == "silent", verdict
    assert not verdict.fits(ALL["silent"])


def test_the_table_has_all_of_torch() -> None:
    kinds = {type(each.optimizer(each.model().parameters())) for each in VARIANTS.values()}
    shipped = {
        each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, optim.Optimizer)
    }
    assert shipped - {optim.Optimizer} <= kinds
    made = {
        type(each.scheduler(each.optimizer(each.model().parameters())))
        for each in VARIANTS.values()
        if each.scheduler is not None
    }
    known = {getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
    assert known - {lr_scheduler.LRScheduler} <= made
    assert len(VARIANTS) >= 120
