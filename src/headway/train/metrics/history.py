"""The metrics of a run in memory, by epoch and by log point: for plots, early stopping, schedulers and resuming."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.train.metrics.meter import Value

MAX_LOG_POINTS = 10_000
"""log points kept in memory, so that the memory of a long run is bounded; the metrics file keeps all"""


@final
@dataclass(frozen=True, kw_only=True)
class HistoryRow:
    """Metrics at one moment of a run; `step` counts through all stages."""

    stage: str
    epoch: int
    step: int
    values: Mapping[str, Value]


@final
class History:
    """The metrics of a run so far.

    >>> pipe.history["val/loss"]            # one value per epoch that has one
    [0.61, 0.48]
    >>> pipe.history.points("train/loss")   # (step, value) of the log points
    [(50, 0.91), (100, 0.66)]
    """

    def __init__(self) -> None:
        self.epochs: list[HistoryRow] = []
        self.log_points: deque[HistoryRow] = deque(maxlen=MAX_LOG_POINTS)

    def __getitem__(self, name: str) -> list[Value]:
        """Returns the value of each epoch that has one; for a metric of log points only, the last in each epoch."""
        found = [row.values[name] for row in self.epochs if name in row.values]
        if found:
            return found
        ended = {(row.stage, row.epoch) for row in self.epochs}
        points = [row for row in self.log_points if name in row.values and (row.stage, row.epoch) in ended]
        return list({(row.stage, row.epoch): row.values[name] for row in points}.values())

    def __contains__(self, name: object) -> bool:
        """Returns whether any epoch has a value of the metric."""
        return any(name in row.values for row in self.epochs)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the metrics that epochs have."""
        return iter(sorted({name for row in self.epochs for name in row.values}))

    def points(self, name: str) -> list[tuple[int, Value]]:
        """Returns the values of a metric at log points, each with its step."""
        return [(row.step, row.values[name]) for row in self.log_points if name in row.values]

    def names(self) -> list[str]:
        """Returns the names of all metrics that any epoch or log point has."""
        return sorted({name for row in (*self.epochs, *self.log_points) for name in row.values})

    def state_dict(self) -> dict[str, Any]:
        """Returns epochs as plain values and log points as JSON text, which is faster to save when there are many."""
        points = [[row.stage, row.epoch, row.step, row.values] for row in self.log_points]
        return {"epochs": [asdict(row) for row in self.epochs], "points": json.dumps(points)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = [HistoryRow(**row) for row in state["epochs"]]
        points = (
            HistoryRow(stage=stage, epoch=epoch, step=step, values=values)
            for stage, epoch, step, values in json.loads(state["points"])
        )
        self.log_points = deque(points, maxlen=MAX_LOG_POINTS)
