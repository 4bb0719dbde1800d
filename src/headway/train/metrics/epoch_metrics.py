"""Metrics with a `compute` of their own, such as those of torchmetrics, which `add_metric` takes."""

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
from torch import Tensor, nn

from headway.dist.collective.exchange import RankExchange, gather_rows
from headway.errors import UsageError
from headway.train.metrics.meter import LogPoint, Value


@runtime_checkable
class EpochMetric(Protocol):
    """A metric for `add_metric`: any torchmetrics metric or collection, or an object with these two methods."""

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


@final
class AddedMetrics(dict[str, EpochMetric]):
    """The metrics of a stage by name. Each is computed once per epoch: at its end, or after `post_epoch`.

    A user's loop often validates in `post_epoch`. A metric that is updated only there belongs to the epoch that has
    just ended, as values logged there do, and would be an epoch late if it were computed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[str, EpochMetric] = {}

    def compute(self, logged: Mapping[str, Value], device: torch.device) -> dict[str, Value]:
        """Computes, on all ranks, the metrics that any rank has updated, and leaves the rest to `compute_late`."""
        updated = torch.tensor(
            [_is_updated(metric) for metric in self.values()], dtype=torch.int64, device=device
        )
        anywhere = gather_rows(updated).amax(0).tolist() if self else []
        now = {
            name: metric for (name, metric), any_rank in zip(self.items(), anywhere, strict=True) if any_rank
        }
        self._late = {name: metric for name, metric in self.items() if name not in now}
        return compute_metrics(now, logged)

    def compute_late(self, point: LogPoint) -> LogPoint:
        """Adds the metrics that `compute` has left, on all ranks."""
        late, self._late = self._late, {}
        return replace(point, values=compute_metrics(late, point.values)) if late else point


def _is_updated(metric: EpochMetric) -> bool:
    """Whether a metric was updated since it was reset; one that does not record it counts as updated."""
    parts = metric.values() if isinstance(metric, nn.ModuleDict) else (metric,)
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
    for metric in metrics.values():  # after all are computed, since one metric may have two names
        metric.reset()
    check_names(found, logged)
    if metrics:  # on all ranks alike; `found` may be empty on some
        exchange = RankExchange("compare the values of their metrics")
        found = exchange.round(lambda: found, _first_of_equals)
    return {**logged, **found}


def _first_of_equals(values: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """Returns rank 0's values for each rank; raises `UsageError` if those of another differ by more than rounding.

    Ranks decide by these values when to stop, and a decision of one rank alone would leave the others in a collective.
    """
    first = values[0]
    for rank, theirs in enumerate(values[1:], start=1):
        for name in {**first, **theirs}:
            if not _is_close(first.get(name), theirs.get(name)):
                raise UsageError(
                    f"metric {name!r} is {first.get(name)!r:.80} on rank 0 and {theirs.get(name)!r:.80} on rank "
                    f"{rank}: reduce its counts over ranks in compute(), as torchmetrics do, or log a mean with "
                    "self.log()"
                )
    return [first] * len(values)


def _is_close(first: Value | None, second: Value | None) -> bool:
    if first is None or second is None:
        return False
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, equal_nan=True)


@contextmanager
def keeping_counts(metrics: Iterable[EpochMetric]) -> Iterator[None]:
    """Resets metrics for the context, and restores their counts on exit.

    It copies the tensors and containers among the attributes of the metrics and of metrics inside them, and the items
    of a metric that is a container itself. It does not copy anything else, such as a network that a metric applies, or
    a process group.
    """
    every = {id(metric): metric for metric in metrics}.values()
    parts: dict[int, Any] = {}
    for metric in every:
        _find_parts(metric, parts)
    before = [
        (part, [_copy(attributes) for attributes in _attributes(part)], _copy(_items(part)))
        for part in parts.values()
    ]
    for metric in every:
        metric.reset()
    try:
        yield
    finally:
        for part, kept, items in before:
            _restore(part, *kept)
            _restore_items(part, items)


def _find_parts(value: Any, found: dict[int, Any]) -> None:
    """Adds to `found`, by id, the objects below `value` that have counts of their own and a `reset`."""
    if id(value) in found or isinstance(value, type):
        return
    below: Iterable[Any]
    match value:
        case nn.Module() if not isinstance(value, EpochMetric):
            below = value.children()  # a container of metrics, or a network, which counts nothing
        case _ if callable(getattr(value, "reset", None)):
            found[id(value)] = value
            below = (*_attributes(value), *_items(value))
        case dict():
            below = value.values()
        case list() | tuple() | deque():
            below = value
        case _:
            return
    for each in below:
        _find_parts(each, found)


def _attributes(part: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the attributes of an object in its `__dict__`, and those in its slots."""
    state = object.__getstate__(part)  # not a `__getstate__` of its own, for pickle
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return attributes or {}, slots or {}


def _restore(part: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> None:
    if hasattr(part, "__dict__"):
        vars(part).clear()
        vars(part).update(attributes)
    for name in _attributes(part)[1].keys() - slots.keys():
        object.__delattr__(part, name)
    for name, value in slots.items():
        object.__setattr__(part, name, value)


def _items(part: Any) -> list[Any]:
    """Returns the items of an object that is a container itself; those of a dict as pairs."""
    match part:
        case dict():
            return [*part.items()]
        case list() | set() | deque():
            return [*part]
    return []


def _restore_items(part: Any, items: list[Any]) -> None:
    match part:
        case dict():
            part.clear()
            for key, value in items:
                part[key] = value
        case set():
            part.clear()
            part |= set(items)
        case list() | deque():
            part.clear()
            part.extend(items)


def _copy(value: Any) -> Any:
    """Returns a copy of a tensor, array or container, in which a metric counts; returns anything else as it is."""
    match value:
        case nn.Parameter():
            return value  # an optimizer may hold it
        case Tensor():
            return value.detach().clone()
        case np.ndarray():
            return value.copy()
        case dict():
            copied = copy(value)  # of the same class, in the same order
            for key, part in value.items():
                copied[key] = _copy(part)  # `update` of a Counter would add
            return copied
        case list():
            row = copy(value)
            row[:] = [_copy(part) for part in value]
            return row
        case deque():
            queue = copy(value)
            queue.clear()
            queue.extend(map(_copy, value))
            return queue
        case tuple() if type(value) is tuple:
            return tuple(map(_copy, value))
        case tuple() if hasattr(value, "_make"):  # a named tuple
            return value._make(map(_copy, value))
        case set():
            return copy(value)
        case _:
            return value


def metrics_of_set(
    metrics: Mapping[str, EpochMetric], prefix: str, *, prefixes: Collection[str], default: str
) -> dict[str, EpochMetric]:
    """Returns the metrics of one validation set of several, by the names that they have there.

    A metric under the default prefix belongs to every set; one under the prefix of a set belongs to that set only.

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
        if not name.isprintable():
            raise UsageError(f"{name!r:.80} is not a valid name of a metric: give a line of printable text")
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


_UPDATES = "headway_updates"  # a key that no state of a metric has: those are names of attributes


def metric_state(thing: Any) -> dict[str, Any]:
    """Returns the `state_dict` of an object; for a metric, with the number of updates of each of its parts.

    torchmetrics does not save these numbers, but averages by them, and needs them to know whether to compute.
    """
    state: dict[str, Any] = thing.state_dict()
    counts = [part._update_count for part in _counting_parts(thing)]
    return {**state, _UPDATES: counts} if counts else state


def load_metric_state(thing: Any, state: Any) -> None:
    """Restores the result of `metric_state`."""
    parts = _counting_parts(thing)
    if not isinstance(state, Mapping) or _UPDATES not in state:
        thing.load_state_dict(state)  # not a metric, or an older checkpoint, which has no counts
        return
    thing.load_state_dict({name: value for name, value in state.items() if name != _UPDATES})
    for part, count in zip(parts, state[_UPDATES], strict=False):
        part._update_count, part._computed = count, None  # a cached result is that of another state


def _counting_parts(thing: object) -> list[Any]:
    """Returns the parts of a metric that count updates; metrics inside another module do not save their states."""
    parts = thing.modules() if isinstance(thing, nn.Module) and isinstance(thing, EpochMetric) else ()
    return [part for part in parts if isinstance(getattr(part, "_update_count", None), int)]
