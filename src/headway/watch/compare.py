"""Runs side by side: the settings in which they differ, where they stand, and how good they became."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import yaml

from headway.errors import UsageError
from headway.run import Run
from headway.run.plain import leaves
from headway.watch.runs import Row, metric_rows, rows

Better = Literal["min", "max"]
_LOWER = re.compile(
    r"loss|err(or)?\b|perplexity|\bppl|\bm[as]e|\brmse|\bnll|\b[wc]er\b|\bfid\b|\bbp[bc]\b|distance"
)
_HIGHER = re.compile(
    r"acc|\bauc|\bf1|\bmap\b|iou|precision|recall|bleu|rouge|psnr|ssim|\br2\b|score|reward|\btop\W?\d"
)
_MOST_METRICS = 4


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of one run: its last value, and its best if it is known which way is better."""

    last: float | str | None = None
    best: float | None = None
    best_step: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run among those compared."""

    row: Row
    settings: Mapping[str, Any]
    """those in which the runs differ; a name that a run does not have is not there"""
    metrics: Mapping[str, Metric]

    def plain(self) -> dict[str, Any]:
        """For programs."""
        metrics = {name: vars(metric) for name, metric in self.metrics.items()}
        return self.row.plain() | {"settings": dict(self.settings), "metrics": metrics}


def compare(runs: Sequence[Run], *, metrics: Sequence[str] = ()) -> list[Compared]:
    """Sets runs side by side, in the order given. `metrics` are names; `min:NAME` or `max:NAME` say what is best.

    >>> [run.metrics["val/loss"].best for run in compare(runs, metrics=["val/loss"])]
    [0.31, 0.29]
    """
    found = rows(runs)
    settings = [_settings(row) for row in found]
    differing = [name for name in _union(settings) if len({_text(each.get(name)) for each in settings}) > 1]
    histories = [_history(row.run) for row in found]
    wanted = dict(map(_direction, metrics)) or _choice(histories)
    if unknown := [name for name in wanted if not any(name in history for history in histories)]:
        known = ", ".join(_union(histories)) or "none"
        raise UsageError(f"none of these runs has a metric {unknown[0]!r}; there are: {known}")
    return [
        Compared(
            row=row,
            settings={name: each[name] for name in differing if name in each},
            metrics={name: _metric(history.get(name, []), better) for name, better in wanted.items()},
        )
        for row, each, history in zip(found, settings, histories, strict=True)
    ]


def _settings(row: Row) -> dict[str, Any]:
    """What the run recorded of its settings, and what the sweep set, which may be more."""
    try:
        recorded = yaml.safe_load(row.run.config_file.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        recorded = None
    flat = dict(leaves(recorded))
    return flat | {k: v for k, v in (row.sweep.settings if row.sweep else {}).items() if k not in flat}


History = dict[str, list[tuple[int, float | str]]]


def _history(run: Run) -> History:
    """Every metric of the root, with steps. After a restart steps come again: the later ones count."""
    history: dict[str, dict[int, float | str]] = {}
    try:
        lines = run.metrics_file(0).read_bytes().split(b"\n")[:-1]
    except OSError:
        return {}
    for row in metric_rows(lines):
        for name, value in row["metrics"].items():
            if isinstance(value, int | float | str):
                history.setdefault(name, {})[int(row["step"])] = value
    return {name: sorted(values.items()) for name, values in history.items()}


def _metric(values: Sequence[tuple[int, float | str]], better: Better | None) -> Metric:
    if not values:
        return Metric()
    finite = [(step, value) for step, value in values if not isinstance(value, str) and math.isfinite(value)]
    if better is None or not finite:
        return Metric(last=values[-1][1])
    step, best = (min if better == "min" else max)(finite, key=lambda pair: pair[1])
    return Metric(last=values[-1][1], best=best, best_step=step)


def _direction(wanted: str) -> tuple[str, Better | None]:
    """A metric, and whether less or more of it is better.

    >>> _direction("val/loss"), _direction("max:val/loss"), _direction("lr")
    (('val/loss', 'min'), ('val/loss', 'max'), ('lr', None))
    """
    for better in ("min", "max"):
        if wanted.startswith(f"{better}:"):
            return wanted[4:], better
    last = wanted.rpartition("/")[2].lower()
    return wanted, "min" if _LOWER.search(last) else "max" if _HIGHER.search(last) else None


def _choice(histories: Sequence[History]) -> dict[str, Better | None]:
    """The metrics to show when nobody says which: those that can be better or worse, of validation first."""
    judged = {name: better for name, better in map(_direction, _union(histories)) if better}
    names = sorted(judged, key=lambda name: (name.startswith("train"), judged[name] != "min"))
    return {name: judged[name] for name in names[:_MOST_METRICS]}


def _union(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """All names, in the order in which they first appear."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
