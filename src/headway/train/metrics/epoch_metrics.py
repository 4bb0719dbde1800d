"""Metrics that compute themselves, such as those of torchmetrics: what `add_metric` takes, and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headway.dist.collective.exchange import gather_rows
from headway.errors import UsageError
from headway.train.metrics.meter import LogPoint, Value


@runtime_checkable
class EpochMetric(Protocol):
    """What `add_metric` takes: any torchmetrics metric or collection, or an object with these two methods."""

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


@final
class AddedMetrics(dict[str, EpochMetric]):
    """The metrics of a stage by name. Each is computed once per epoch: at its end, or after `post_epoch`.

    A loop of one's own often validates in `post_epoch`. A metric that is updated only there belongs to the epoch that
    has just ended, as what is logged there does, and would be an epoch late if it were computed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[str, EpochMetric] = {}

    def compute(self, logged: Mapping[str, Value], device: torch.device) -> dict[str, Value]:
        """Computes, on all ranks, what any rank has updated; the others wait for `compute_late`."""
        updated = torch.tensor(
            [_is_updated(metric) for metric in self.values()], dtype=torch.int64, device=device
        )
        anywhere = gather_rows(updated).amax(0).tolist() if self else []
        now = {name: metric for (name, metric), there in zip(self.items(), anywhere, strict=True) if there}
        self._late = {name: metric for name, metric in self.items() if name not in now}
        return compute_metrics(now, logged)

    def compute_late(self, point: LogPoint) -> LogPoint:
        """Adds what was left to this log point, on all ranks."""
        late, self._late = self._late, {}
        return replace(point, values=compute_metrics(late, point.values)) if late else point


def _is_updated(metric: EpochMetric) -> bool:
    """Whether a metric says that it was updated since it was reset; one that cannot say so counts as updated."""
    parts = metric.values() if isinstance(metric, torch.nn.ModuleDict) else (metric,)
    return any(getattr(part, "update_called", True) for part in parts)


def compute_metrics(metrics: Mapping[str, EpochMetric], logged: Mapping[str, Value]) -> dict[str, Value]:
    """Computes and resets metrics, on all ranks; returns their values together with those that were logged.

    A metric that computes several values, such as a MetricCollection, has a value under `name/key` for each.
    """
    found: dict[str, Value] = {}
    for name in sorted(metrics):
        result = metrics[name].compute()
        for key, part in result.items() if isinstance(result, Mapping) else [("", result)]:
            found[f"{name}/{key}" if key else name] = _plain(name, part)
    for metric in metrics.values():  # which may have two names
        metric.reset()
    check_names(found, logged)
    return {**logged, **found}


@contextmanager
def keeping_counts(metrics: Iterable[EpochMetric]) -> Iterator[None]:
    """Has metrics begin at zero within, and restores on exit what they had counted.

    The tensors and containers among their attributes are copied, those of each part of a collection on its own.
    """
    every = {id(metric): metric for metric in metrics}.values()
    parts = [
        part for each in every for part in (each.modules() if isinstance(each, torch.nn.Module) else [each])
    ]
    before = [(vars(part), {name: _copy(value) for name, value in vars(part).items()}) for part in parts]
    for metric in every:
        metric.reset()
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)


def _copy(value: Any) -> Any:
    """Returns a copy of what a metric counts in; all else is returned as it is, such as a process group."""
    match value:
        case Tensor():
            return value.detach().clone()
        case np.ndarray():
            return value.copy()
        case dict():
            copied = copy(value)  # of the same class, in the same order
            copied.update({key: _copy(part) for key, part in value.items()})
            return copied
        case list():
            return [_copy(part) for part in value]
        case set() | deque():
            return copy(value)
        case _:
            return value


def metrics_of_set(
    metrics: Mapping[str, EpochMetric], prefix: str, *, prefixes: Collection[str], default: str
) -> dict[str, EpochMetric]:
    """Returns the metrics of one validation set of several, by the names that they have there.

    A metric under the default prefix is one of every set; one under the prefix of a set is of that set only.

    >>> metrics_of_set({"val/auroc": metric}, "ood/", prefixes=("val/", "ood/"), default="val/")
    {'ood/auroc': metric}
    """
    found: dict[str, EpochMetric] = {}
    for name, metric in metrics.items():
        owner = max((each for each in (default, *prefixes) if name.startswith(each)), key=len, default=None)
        if owner == prefix:
            found[name] = metric
        elif owner == default and (own := prefix + name.removeprefix(default)) not in metrics:
            found[own] = metric
    return found


def check_names(added: Iterable[str], logged: Mapping[str, Value]) -> None:
    """Raises `UsageError` if a metric that was added has the name of one that is logged."""
    for name in added:
        if name in logged:
            raise UsageError(
                f"metric {name!r} is logged and added with add_metric(): choose another name for one of them"
            )


def _plain(name: str, result: Any) -> Value:
    if isinstance(result, Tensor | np.ndarray | np.generic):
        plain: Value = result.tolist()
        return plain
    if isinstance(result, Real):
        return float(result)
    raise UsageError(
        f"metric {name!r} computed {result!r:.80}: return a number, a tensor, or a mapping from names to them"
    )
