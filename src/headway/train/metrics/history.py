"""What was measured, by epoch and by log point: for plots, early stopping, schedulers and resuming."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.train.metrics.meter import Value

LOG_POINTS = 10_000
"""How many log points are kept in memory, so that a long run does not grow; the metrics file keeps all."""


@final
@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """Metrics at one moment of a run; `step` counts through all stages."""

    stage: str
    epoch: int
    step: int
    values: Mapping[str, Value]


@final
class History:
    """Metrics of a run so far.

    >>> pipe.history["val/loss"]            # one value per epoch that has one
    [0.61, 0.48]
    >>> pipe.history.points("train/loss")   # (step, value) of the log points
    [(50, 0.91), (100, 0.66)]
    """

    def __init__(self) -> None:
        self.epochs: list[MetricRow] = []
        self.log_points: deque[MetricRow] = deque(maxlen=LOG_POINTS)

    def __getitem__(self, name: str) -> list[Value]:
        return [row.values[name] for row in self.epochs if name in row.values]

    def points(self, name: str) -> list[tuple[int, Value]]:
        """The values of a metric at log points, each with its step."""
        return [(row.step, row.values[name]) for row in self.log_points if name in row.values]

    def names(self) -> list[str]:
        """All metrics that any epoch or log point has."""
        return sorted({name for row in (*self.epochs, *self.log_points) for name in row.values})

    def state_dict(self) -> dict[str, Any]:
        """The epochs as plain values; the log points, which may be many, as text, which is quick to keep."""
        points = [[row.stage, row.epoch, row.step, row.values] for row in self.log_points]
        return {"epochs": [asdict(row) for row in self.epochs], "points": json.dumps(points)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = [MetricRow(**row) for row in state["epochs"]]
        points = (
            MetricRow(stage=stage, epoch=epoch, step=step, values=values)
            for stage, epoch, step, values in json.loads(state["points"])
        )
        self.log_points = deque(points, maxlen=LOG_POINTS)
