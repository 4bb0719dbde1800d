"""Metrics that compute themselves, such as those of torchmetrics: what `add_metric` takes, and their results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from headway.errors import UsageError
from headway.train.metrics.meter import Value


@runtime_checkable
class EpochMetric(Protocol):
    """What `add_metric` takes: any torchmetrics metric or collection, or an object with these two methods."""

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


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
