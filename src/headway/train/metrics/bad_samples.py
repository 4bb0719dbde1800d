"""Bad samples of loaders: counted over all ranks at log points, where too many stop the run on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, final, runtime_checkable

from headway.train.metrics.meter import LogPoint, MetricAccumulator


@runtime_checkable
class QuarantiningLoader(Protocol):
    """A loader that replaces or leaves out bad samples, as `hw.data.ShardLoader` does."""

    def take_bad(self) -> int:
        """Returns the bad samples of this rank since the last call."""

    def check_bad(self, new: int) -> None:
        """Raises on all ranks if they have too many bad samples, given those of all ranks since the last call."""


@final
class BadSamples:
    """The bad samples of those datasets whose loaders count them, as the metric `data/NAME/bad` of each."""

    def __init__(self, datasets: Mapping[str, Iterable[Any]]) -> None:
        self._loaders = {
            f"data/{name}/bad": loader
            for name, loader in datasets.items()
            if isinstance(loader, QuarantiningLoader)
        }

    def log(self, meter: MetricAccumulator) -> None:
        """Logs the bad samples of this rank since the last log point, even if it has no good ones."""
        for name, loader in self._loaders.items():
            meter.log(name, loader.take_bad(), reduce="sum", group="data")

    def check(self, point: LogPoint) -> None:
        """Raises on all ranks if a loader has too many bad samples over all ranks."""
        for name, loader in self._loaders.items():
            new = point.values.get(name)
            if isinstance(new, float) and new:
                loader.check_bad(round(new))
