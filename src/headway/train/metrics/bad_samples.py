"""Bad samples of loaders: counted over all ranks at log points, where too many stop the run on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from headway.train.metrics.meter import LogPoint, MetricAccumulator


@runtime_checkable
class QuarantiningLoader(Protocol):
    """A loader that replaces or leaves out bad samples, as `hw.data.ShardLoader` does."""

    def take_bad(self) -> int:
        """Returns the bad samples of this rank since the last call."""

    def check_bad(self, new: int) -> None:
        """Raises on all ranks if they have too many bad samples, given those of all ranks since the last call."""


def quarantining(datasets: Mapping[str, Iterable[Any]]) -> dict[str, QuarantiningLoader]:
    """Returns the loaders that count bad samples, by the name of their metric."""
    return {
        f"data/{name}/bad": loader
        for name, loader in datasets.items()
        if isinstance(loader, QuarantiningLoader)
    }


def log_bad(loaders: Mapping[str, QuarantiningLoader], meter: MetricAccumulator) -> None:
    """Logs the bad samples of this rank since the last log point, also if it has no good one."""
    for name, loader in loaders.items():
        meter.log(name, loader.take_bad(), reduce="sum", group="data")


def check_bad(loaders: Mapping[str, QuarantiningLoader], point: LogPoint) -> None:
    """Raises on all ranks if a loader has too many bad samples on all ranks together."""
    for name, loader in loaders.items():
        new = point.values.get(name)
        if isinstance(new, float) and new:
            loader.check_bad(round(new))
