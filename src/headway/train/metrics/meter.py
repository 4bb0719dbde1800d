"""Metric accumulation: values stay on the device, and one collective per log point reduces them over all ranks.

Each metric is a running (sum, weight) pair in double precision. `MetricAccumulator.log` adds to it: one kernel for a
tensor, none for a number, and no wait. `MetricAccumulator.reduce` is the log point: one all-gather of one flat vector
that holds all metrics, a hash of their names and a word of flags. It is an all-gather rather than an all-reduce because
one collective then serves means, minima and flags, every rank adds the same numbers in the same order, and messages can
name the rank with a non-finite value.

The layout that all ranks agreed on fixes the length of the vector. So ranks that log different names still run a valid
collective; then they compare the hashes, exchange their lists of names, and raise an error that lists the differences.
A rank logs either all metrics of a group or none: if its shard of that data is empty, it adopts the names of the other
ranks. Each validation set is a group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.dist.collective.exchange import RankExchange, gather_rows, rank_and_size
from headway.dist.device import exact_dtype
from headway.errors import UsageError

Reduction = Literal["mean", "sum", "min", "max", "last"]
Scope = Literal["global", "rank"]
Value: TypeAlias = "float | list[Value]"
Array: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Sums: TypeAlias = tuple[Array, float]
"""the accumulated values of a metric, flat, and their total weight"""

_START = {"mean": 0.0, "sum": 0.0, "last": 0.0, "min": math.inf, "max": -math.inf}  # changes no merged result
_MERGE = {"mean": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum}
_HEADER = (
    6  # hash of the keys, flags, busy seconds, whether the rank's sums count, its first batch, its mixes
)


class MetricKey(NamedTuple):
    """What ranks must agree on about a metric."""

    name: str
    reduction: str
    shape: tuple[int, ...]
    group: str = ""


@final
class Cell:
    """Accumulates one metric between two log points: numbers on the host, tensors on their device."""

    def __init__(self, key: MetricKey, device: torch.device) -> None:
        self.key, self.reduction, self.shape = key, key.reduction, key.shape
        self.total = torch.full(key.shape, _START[key.reduction], dtype=exact_dtype(device), device=device)
        self.host = _START[key.reduction]
        # the total weight of a mean; of another reduction, the number of values that count
        self.weight = 0.0  # on the host, as most weights are batch sizes
        self.device_weight: Tensor | None = None  # for weights that are tensors, such as token counts

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Adds a value. One of weight 0 does not count; if the weight is a tensor, this is decided on the device."""
        if isinstance(value, Tensor):
            value = value.detach()
            if value.ndim and value.device != self.total.device:  # a single number may be on any device
                value = value.to(self.total, non_blocking=True)
        if isinstance(weight, Tensor):
            self._add_weighed(value, weight.detach().to(self.total, non_blocking=True))
        elif weight:
            self.weight += float(weight) if self.reduction == "mean" else 1.0
            if isinstance(value, Tensor):
                self._add_tensor(value, float(weight))
            else:
                self._add_number(float(value), float(weight))

    def _add_weighed(self, value: Tensor | float, weight: Tensor) -> None:
        exact = value.to(weight.dtype) if isinstance(value, Tensor) else weight.new_full((), float(value))
        counts = weight != 0
        counted = torch.where(
            counts, exact, self.total if self.reduction == "last" else _START[self.reduction]
        )
        if self.reduction == "mean":
            self.total.addcmul_(counted, weight)
        else:
            self._add_tensor(counted, 1.0)
            weight = counts.to(weight.dtype)
        self.device_weight = weight + (0 if self.device_weight is None else self.device_weight)

    def _add_tensor(self, value: Tensor, weight: float) -> None:
        match self.reduction:
            case "mean":
                self.total.add_(value, alpha=weight)
            case "sum":
                self.total.add_(value)
            case "min":
                torch.minimum(self.total, value, out=self.total)
            case "max":
                torch.maximum(self.total, value, out=self.total)
            case "last":
                self.total.copy_(value)

    def _add_number(self, value: float, weight: float) -> None:
        match self.reduction:
            case "mean":
                self.host += value * weight
            case "sum":
                self.host += value
            case "min":
                self.host = value if value < self.host or math.isnan(value) else self.host
            case "max":
                self.host = value if value > self.host or math.isnan(value) else self.host
            case "last":
                self.total.fill_(value)

    def sums(self) -> Tensor:
        """Returns the accumulated values, flat; valid until `reset`."""
        total = self.total.reshape(-1)
        if self.host == _START[self.reduction]:
            return total
        match self.reduction:
            case "min":
                return total.clamp(max=self.host)
            case "max":
                return total.clamp(min=self.host)
            case _:
                return total + self.host

    def total_weight(self) -> float:
        """Returns the weight on the host and on the device."""
        return self.weight + (0.0 if self.device_weight is None else self.device_weight.item())

    def reset(self) -> None:
        self.total.fill_(_START[self.reduction])
        self.host, self.weight, self.device_weight = _START[self.reduction], 0.0, None


@final
@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """The result of a log point, the same on all ranks except for `local`."""

    values: Mapping[str, Value]
    """metrics reduced over all ranks"""
    local: Mapping[str, Value]
    """metrics of scope "rank", of this rank alone"""
    flags: Sequence[int]
    """the flags of each rank, as a bit mask"""
    busy: Sequence[float]
    """the busy seconds that each rank reported"""
    first_batches: Sequence[float]
    """a number for the first batch of each rank, where these are compared; else 0"""
    mixes: Sequence[float]
    """a number for the weights of the mixes of each rank"""
    data_ranks: int
    """the number of ranks with batches of their own; fewer than all if some compute one model together"""
    not_finite: Mapping[str, Sequence[int]]
    """metrics with a non-finite sum, and the ranks that contributed it"""


@final
class MetricAccumulator:
    """Accumulates the metrics of one kind of work, such as training or validation. Call `reduce` on all ranks.

    >>> meter = MetricAccumulator(torch.device("cpu"))
    >>> meter.log("loss", torch.tensor(0.5), weight=3)
    >>> meter.log("loss", torch.tensor(0.1), weight=1)
    >>> meter.reduce().values
    {'loss': 0.4...}
    >>> meter.finish_epoch()  # over all log points since the last one
    {'loss': 0.4...}
    """

    def __init__(self, device: torch.device, *, repeats_batches: bool = False) -> None:
        self._device = device
        # whether another rank has the same ones, whose sums count for both
        self._repeats_batches = repeats_batches
        self.first_batch = 0
        """a number for the first batch of this rank, exchanged at the next log point; 0 if there is none"""
        self.mixes = 0
        """a number for the weights of this rank's mixes, exchanged likewise"""
        self._cells: dict[str, Cell] = {}  # of scope "global"
        self._rank_cells: dict[str, Cell] = {}  # of scope "rank"
        self._agreed: tuple[MetricKey, ...] = ()
        self._epoch: dict[str, Sums] = {}  # name -> sums and weight over the log points of this epoch

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float = 1.0,
        reduce: Reduction = "mean",
        scope: Scope = "global",
        group: str = "",
    ) -> None:
        """Adds a value to a metric, without waiting or communicating; one of weight 0 only registers the name.

        A rank may log no metric of a group, while others log them all.
        """
        cells = self._cells if scope == "global" else self._rank_cells
        cell = cells.get(name)
        if cell is None or cell.reduction != reduce:
            cell = self._new_cell(name, value, reduce, scope, group)
        shape = value.shape if isinstance(value, Tensor) else ()
        if shape != cell.shape:
            raise UsageError(
                f"metric {name!r} was logged with shape {cell.shape} and now has shape {tuple(shape)}: "
                "log values of one shape, or reduce them first"
            )
        if isinstance(weight, Tensor) and weight.ndim:
            raise UsageError(
                f"metric {name!r} was logged with a weight of shape {tuple(weight.shape)}: give a number, or a tensor "
                "with one, such as mask.sum()"
            )
        cell.add(value, weight)

    def has_logged(self, name: str) -> bool:
        """Whether a value was logged under this name since the last log point."""
        cell = self._cells.get(name) or self._rank_cells.get(name)
        return cell is not None and (cell.weight != 0 or cell.device_weight is not None)

    def _new_cell(
        self, name: str, value: Tensor | float, reduce: Reduction, scope: Scope, group: str
    ) -> Cell:
        cells = {"global": self._cells, "rank": self._rank_cells}.get(scope)
        if cells is None:
            raise UsageError(f'metric {name!r}: scope={scope!r} is unknown: use "global" or "rank"')
        if reduce not in get_args(Reduction):
            known = ", ".join(f'"{kind}"' for kind in get_args(Reduction))
            raise UsageError(f"metric {name!r}: reduce={reduce!r} is unknown: use one of {known}")
        if not name.isprintable():
            raise UsageError(f"{name!r:.80} is not a valid name of a metric: give a line of printable text")
        if name in self._cells or name in self._rank_cells:
            before = (self._cells.get(name) or self._rank_cells[name]).reduction
            raise UsageError(
                f'metric {name!r} was logged with reduce="{before}" and now with "{reduce}" (scope "{scope}"): '
                "give the second one another name"
            )
        if not isinstance(value, Tensor | int | float | np.number):
            raise UsageError(
                f"metric {name!r} is of type {type(value).__name__}: log a number or a tensor, on any device"
            )
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        cells[name] = Cell(MetricKey(name, reduce, shape, group), self._device)
        return cells[name]

    def reduce(self, flags: int = 0, *, busy: float = 0.0) -> LogPoint:
        """Holds a log point: reduces the values that all ranks have logged since the last one, and exchanges flags."""
        mine, agreed = tuple(cell.key for cell in self._cells.values()), _hash(self._agreed)
        counts = 0.0 if self._repeats_batches else 1.0
        header = [_hash(_adopt(mine, self._agreed)), flags, busy, counts, self.first_batch, self.mixes]
        table = self._gather(self._agreed, header)
        counted = table[:, 3] > 0
        found = self._reduce_table(self._agreed, table[:, _HEADER:], counted)
        if (table[:, 0] != agreed).any():  # some rank has a new metric
            extra = tuple(key for key in _agree(mine) if key not in self._agreed)
            found |= self._reduce_table(extra, self._gather(extra), counted)
            self._agreed += extra
        local = {name: _value(cell.key, self._take_local(cell)) for name, cell in self._rank_cells.items()}
        return LogPoint(
            values={name: value for name, (value, _) in found.items()},
            local={name: value for name, value in local.items() if value is not None},
            flags=[int(word) for word in table[:, 1].tolist()],
            busy=table[:, 2].tolist(),
            first_batches=table[:, 4].tolist(),
            mixes=table[:, 5].tolist(),
            data_ranks=int(counted.sum()),
            not_finite={name: ranks for name, (_, ranks) in found.items() if ranks},
        )

    def finish_epoch(self) -> dict[str, Value]:
        """Returns the metrics over all log points since the last call, and resets them."""
        found = {
            key.name: _value(key, self._epoch[key.name]) for key in self._agreed if key.name in self._epoch
        }
        self._epoch = {}
        return {name: value for name, value in found.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the unfinished epoch, as plain values. Call it right after a log point, on any rank."""
        return {
            "keys": [
                list(key[:3]) for key in self._agreed
            ],  # without groups: a resumed run has all keys on all ranks
            "epoch": {name: [*sums.tolist(), weight] for name, (sums, weight) in self._epoch.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._agreed = tuple(map(_read_key, state["keys"]))
        self._epoch = {name: (np.array(sums[:-1]), sums[-1]) for name, sums in state["epoch"].items()}
        for key in self._agreed:
            self._cells[key.name] = Cell(key, self._device)

    def rank_state_dict(self) -> list[list[Any]]:
        """Returns what this rank has logged since the last log point (such as in a callback), as plain values."""
        scopes = (("global", self._cells), ("rank", self._rank_cells))
        return [
            [scope, list(cell.key), cell.sums().tolist(), cell.total_weight()]
            for scope, cells in scopes
            for cell in cells.values()
            if cell.weight or cell.device_weight is not None
        ]

    def load_rank_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        for scope, saved, sums, weight in state:
            key, cells = _read_key(saved), self._cells if scope == "global" else self._rank_cells
            cell = cells.setdefault(key.name, Cell(key, self._device))
            cell.total.copy_(torch.tensor(sums, dtype=cell.total.dtype).reshape(key.shape))
            cell.weight = weight

    # --- between ranks

    def _gather(self, keys: Sequence[MetricKey], header: Sequence[float] = ()) -> Array:
        """Returns one row per rank (header, weights and sums in the order of `keys`) and resets the cells."""
        cells = [self._cells.get(key.name) or Cell(key, self._device) for key in keys]
        numbers = [*header, *(cell.weight for cell in cells)]
        if rank_and_size()[1] == 1 and all(cell.device_weight is None for cell in cells):
            sums = [cell.sums() for cell in cells]  # values on the host stay there
            table = np.array([[*numbers, *(torch.cat(sums).tolist() if sums else ())]])
        else:
            table = gather_rows(self._pack(cells, numbers, at=len(header))).numpy()
        for cell in cells:
            cell.reset()
        return table

    def _pack(self, cells: Sequence[Cell], numbers: Sequence[float], at: int) -> Tensor:
        """Returns `numbers`, whose weights begin at index `at`, and all sums as one flat vector on the device.

        The numbers are copied to the device in one transfer, without waiting.
        """
        first = torch.tensor(numbers, dtype=exact_dtype(self._device)).to(self._device, non_blocking=True)
        for place, cell in enumerate(cells, start=at):
            if cell.device_weight is not None:
                first[place] += cell.device_weight
        return torch.cat([first, *(cell.sums() for cell in cells)])

    def _reduce_table(
        self, keys: Sequence[MetricKey], table: Array, counted: Mask
    ) -> dict[str, tuple[Value, list[int]]]:
        """Returns the value of each metric that was logged, and the ranks that contributed a non-finite sum.

        `table` has the vectors of all ranks from `_pack`, without the header; `counted` marks ranks whose sums count.
        """
        found: dict[str, tuple[Value, list[int]]] = {}
        at = len(keys)
        with np.errstate(all="ignore"):  # non-finite values are reported by rank, not by numpy's warnings
            for place, key in enumerate(keys):
                size = math.prod(key.shape)
                sums, weights = table[:, at : at + size], table[:, place]
                at += size
                now = _merge_ranks(sums, weights, key.reduction, counted)
                value = _value(key, now)
                if value is None:
                    continue
                finite = np.isfinite(sums)
                bad = [] if finite.all() else np.flatnonzero(~finite.all(axis=1) & (weights != 0)).tolist()
                found[key.name] = value, bad
                before = self._epoch.get(key.name)
                self._epoch[key.name] = (
                    now if before is None else _merge_log_points(before, now, key.reduction)
                )
        return found

    def _take_local(self, cell: Cell) -> Sums:
        """Returns the sums and the weight of a metric of scope "rank", and resets its cell."""
        weight = cell.total_weight()
        sums: Array = cell.sums().cpu().numpy().astype(np.float64)  # a copy
        cell.reset()
        return sums, weight


def _value(key: MetricKey, sums: Sums) -> Value | None:
    """Returns the value of a metric from its sums and weight; None if nothing was logged."""
    total, weight = sums
    if weight == 0:
        return None
    plain: Value = (total / weight if key.reduction == "mean" else total).reshape(key.shape).tolist()
    return plain


def _merge_ranks(sums: Array, weights: Array, reduction: str, counted: Mask) -> Sums:
    """Merges the rows of all ranks into one; ranks that share their batches count once in a sum."""
    if len(weights) == 1:
        return sums[0], float(weights[0])
    if reduction == "last":  # the value of the lowest rank that has one
        total = sums[int((weights != 0).argmax())].copy()
    else:
        total = _MERGE[reduction].reduce(sums[counted] if reduction == "sum" else sums)
    return total, float(weights.sum())


def _merge_log_points(before: Sums, now: Sums, reduction: str) -> Sums:
    """Merges the sums of two log points."""
    total = now[0] if reduction == "last" else _MERGE[reduction](before[0], now[0])
    return total, before[1] + now[1]


def _adopt(mine: tuple[MetricKey, ...], agreed: tuple[MetricKey, ...]) -> tuple[MetricKey, ...]:
    """Returns the keys of a rank, and the agreed keys of groups in which it has logged nothing."""
    groups = {key.group for key in mine}
    return mine + tuple(key for key in agreed if key.group not in groups)


def _agree(mine: tuple[MetricKey, ...]) -> tuple[MetricKey, ...]:
    """Exchanges the lists of keys; raises `UsageError` unless all ranks that logged to a group logged the same keys."""
    exchanged = RankExchange("agree on their metrics").all_gather(lambda: mine)
    lists = [[_read_key(key) for key in keys] for keys in exchanged]
    every = sorted({key for keys in lists for key in keys})
    names, groups = Counter(key.name for key in every), [{key.group for key in keys} for keys in lists]
    different = {}
    for key in every:
        ranks = [rank for rank, keys in enumerate(lists) if key in keys]
        if len(ranks) < sum(key.group in logged for logged in groups) or names[key.name] > 1:
            different[key] = ranks
    if different:
        raise UsageError(_mismatch(different))
    return tuple(every)


@lru_cache(maxsize=64)
def _hash(keys: tuple[MetricKey, ...]) -> float:
    """Returns 48 bits of the keys' hash: an integer that a double holds exactly."""
    digest = hashlib.blake2b(json.dumps(sorted(keys)).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def _read_key(key: Sequence[Any]) -> MetricKey:
    """Returns a key from the list that JSON makes of it."""
    name, reduction, shape, *group = key
    return MetricKey(name, reduction, tuple(shape), *group)


def _mismatch(different: Mapping[MetricKey, Sequence[int]]) -> str:
    parts = []
    for key, ranks in different.items():
        kind = f"{key.reduction} of shape {key.shape}" if key.shape else key.reduction
        parts.append(f"{key.name!r} ({kind}) on rank {', '.join(map(str, ranks))} only")
    return (
        f"ranks log different metrics: {'; '.join(parts)}. Log the same names on every rank (with weight=0 where "
        'there is nothing to count), or use scope="rank"'
    )
