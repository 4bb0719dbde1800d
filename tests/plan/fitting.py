"""The fit of a GPU family's constants on published steps, and the errors of what it gives.

Few constants, one for each thing that no data sheet and no measurement of a single kernel tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp as e_to, hypot, inf, log
from statistics import mean, median
from typing import NamedTuple

from published import Row

from headway.plan.cost.steptime import step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import find_device
from headway.plan.report.bounds import time_bounds

Names = tuple[str, ...]
_HOPPER, _BLACKWELL = (default_calibration(find_device(name)) for name in ("h100-sxm-80", "b200-sxm-180"))
FAMILIES: dict[str, tuple[Calibration, tuple[Names, ...]]] = {
    "hopper": (
        replace(_HOPPER, matrix=0.8, matrix_fp8=0.8, experts=0.8),
        (("matrix", "experts"), ("matrix_fp8",)),
    ),
    # no dense step in 16 bits is published: all products have one constant
    "blackwell": (
        replace(_BLACKWELL, matrix=0.85, matrix_fp8=0.85, experts=0.85),
        (("matrix", "matrix_fp8", "experts"),),
    ),
}
"""By family: where the fit starts, and what is fitted; names in one tuple have one value."""
LIMIT = 1.0
RIDGE = 0.02
"""How strongly a constant is held at its start: with few rows one of them must not move it far."""
OUTLIER = 0.1
"""Logarithmic error above which a row pulls no stronger: software and printed settings differ between the sources."""


def step_s(row: Row, constants: Calibration) -> float:
    return step_time(row.model, row.layout, row.node, constants).total


def fit_family(family: str, rows: Sequence[Row]) -> Calibration:
    """Returns the constants that fit the rows best: coordinate search from the family's start."""
    start, fitted = FAMILIES[family]

    def loss(constants: Calibration) -> float:
        error = mean(hypot(log(step_s(row, constants) / row.seconds), OUTLIER) for row in rows)
        moved = (log(getattr(constants, names[0]) / getattr(start, names[0])) for names in fitted)
        return error + RIDGE * sum(each**2 for each in moved)

    best, least, step = start, loss(start), dict.fromkeys(fitted, 0.2)
    for _ in range(14):
        for names in fitted:
            for sign in (1, -1):
                value = getattr(best, names[0]) * e_to(sign * step[names])
                other = replace(best, **dict.fromkeys(names, value))
                if (now := loss(other) if value <= LIMIT else inf) < least - 1e-9:
                    best, least = other, now
                    break
            else:
                step[names] *= 0.5
    return best


GOAL_MAPE, GOAL_BIAS, GOAL_INSIDE, FEW_ROWS = 0.15, 0.10, (0.80, 0.95), 5
"""What a plan must reach: mean absolute error by family, bias of each group with not too few rows, coverage."""


class Score(NamedTuple):
    """Errors of a group of rows: mean absolute error, median bias, and the share inside their intervals."""

    rows: int
    mape: float
    bias: float
    inside: float

    def cells(self) -> list[str]:
        if not self.rows:
            return ["none"]
        bias = f"{self.bias:+.1%}"
        if self.is_biased:
            bias += " missed"
        return [str(self.rows), f"{self.mape:.1%}", bias, f"{self.inside:.0%}"]

    @property
    def is_biased(self) -> bool:
        """Whether the median is further from zero than the goal; a few rows cannot tell."""
        return self.rows >= FEW_ROWS and abs(self.bias) > GOAL_BIAS


def score(rows: Sequence[Row], constants: Calibration | None = None) -> Score:
    """Scores the constants, by default those of each row's own device."""
    if not rows:
        return Score(0, 0.0, 0.0, 0.0)
    errors, inside = [], 0
    for row in rows:
        used = constants or default_calibration(row.node.device)
        step = step_time(row.model, row.layout, row.node, used)
        bounds = time_bounds(row.model, row.layout, row.node, used, step)
        inside += bounds.low * step.total <= row.seconds <= bounds.high * step.total
        errors.append(step.total / row.seconds - 1)
    return Score(len(rows), mean(map(abs, errors)), median(errors), inside / len(rows))
