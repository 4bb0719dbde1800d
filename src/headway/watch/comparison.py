"""Compares runs: the settings in which they differ, their states, and their metrics."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from typing import Any, Literal, final

import yaml

from headway.errors import UsageError, unknown_name
from headway.launcher.sweep import SweepMember
from headway.record.sinks.rows import RestartDetector
from headway.run import Run
from headway.run.info import DAMAGED
from headway.run.plain import leaves
from headway.watch.runs import RunSummary, metric_rows, summarize
from headway.watch.view.series import LARGEST_VALUE, Series, sparkline
from headway.watch.view.source import read_text

Better = Literal["min", "max"]
_LOWER = re.compile(
    r"loss|err(or)?\b|perplexity|\bppl|\bm[as]e|\brmse|\bnll|\b[wc]er\b|\bfid\b|\bbp[bc]\b|distance"
)
_HIGHER = re.compile(
    r"acc|\bauc|\bf1|\bmap\b|iou|precision|recall|bleu|rouge|psnr|ssim|\br2\b|score|reward|\btop\W?\d"
)
_MAX_METRICS = 4
_CURVE_WIDTH = 24
_DIFF_BYTES = 10 << 20
_CONFIG_BYTES = 1 << 16
"""takes a second to parse; no real settings are longer"""
_MAX_SETTINGS = 2000
_MAX_DEPTH = 100


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of one run: its last value, and its best one if the name tells whether lower or higher is better."""

    last: float | str | None = None
    best: float | None = None
    best_step: int | None = None
    curve: str = ""
    """its values as a line of text"""


@final
@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """One of the compared runs: the settings in which the runs differ, and its metrics."""

    summary: RunSummary
    settings: Mapping[str, Any]
    """only those that differ between the runs, and that this run has"""
    metrics: Mapping[str, Metric]
    code: str = ""
    """the commit, with a star for uncommitted changes; empty if all runs have the same code"""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        metrics = {name: asdict(metric) for name, metric in self.metrics.items()}
        return self.summary.to_dict() | {
            "settings": dict(self.settings),
            "metrics": metrics,
            "code": self.code,
        }


def compare(runs: Sequence[Run], *, metrics: Sequence[str] = ()) -> list[RunComparison]:
    """Compares runs, in the order given. `metrics` are names; `min:NAME` and `max:NAME` choose which value is best.

    >>> [run.metrics["val/loss"].best for run in compare(runs, metrics=["val/loss"])]
    [0.31, 0.29]
    """
    problems: list[str] = []
    found = summarize(runs, warn=problems.append)
    if len(found) < len(runs):
        raise UsageError(problems[-1])
    settings = [settings_of(summary.run, summary.sweep) for summary in found]
    differing = [name for name in _union(settings) if len({_text(each.get(name)) for each in settings}) > 1]
    histories = [_history(summary.run) for summary in found]
    wanted = dict(map(_direction, metrics)) or _default_metrics(histories)
    if unknown := [name for name in wanted if not any(name in history for history in histories)]:
        raise unknown_name("metric of these runs", unknown[0], _union(histories))
    codes = [_code(summary.run) for summary in found]
    same_code = len({(code, diff) for code, diff in codes}) < 2
    return [
        RunComparison(
            summary=summary,
            settings={name: each[name] for name in differing if name in each},
            metrics={name: _metric(history.get(name, []), better) for name, better in wanted.items()},
            code="" if same_code else code,
        )
        for summary, each, history, (code, _) in zip(found, settings, histories, codes, strict=True)
    ]


def code_diff(one: Run, other: Run) -> list[str]:
    """Returns how the code of two runs differs, as lines: their commits, and their uncommitted changes.

    >>> code_diff(one, other)
    ['commits differ: git diff 3f2a91c04b 77ab01d2e9', '--- x7k2: uncommitted changes', ...]
    """
    (commit, diff), (other_commit, other_diff) = _code(one), _code(other)
    commits = [code.rstrip("*") for code in (commit, other_commit)]
    lines = [] if commits[0] == commits[1] else [f"commits differ: git diff {' '.join(commits)}"]
    changes = difflib.unified_diff(
        diff.splitlines(),
        other_diff.splitlines(),
        f"{one.id}: uncommitted changes",
        f"{other.id}: uncommitted changes",
        lineterm="",
    )
    return [*lines, *changes]


def _code(run: Run) -> tuple[str, str]:
    """Returns the commit of a run's code, with a star if it had uncommitted changes, and these changes."""
    code = run.info().get("code")
    code = code if isinstance(code, dict) else {}  # another user's may hold anything
    diff = read_text(run.path, run.diff_file, _DIFF_BYTES) or ""
    return f"{str(code.get('commit') or 'no commit')[:10]}{'*' if code.get('dirty') else ''}", diff


def settings_of(run: Run, member: SweepMember | None) -> dict[str, Any]:
    """Returns the settings of a run by their full names, including those that its sweep sets.

    >>> settings_of(run, None)
    {'lr': 0.0003, 'model.depth': 12}
    """
    text = read_text(run.path, run.config_file, _CONFIG_BYTES) or ""
    try:
        recorded = yaml.safe_load(text) if _depth(text) <= _MAX_DEPTH else None
    except (*DAMAGED, RecursionError, yaml.YAMLError):
        recorded = None
    flat = dict(islice(leaves(recorded), _MAX_SETTINGS))  # anchors can make a small file a huge tree
    return flat | {k: v for k, v in (member.settings if member else {}).items() if k not in flat}


def _depth(text: str) -> int:
    """Returns how deeply brackets are nested: PyYAML takes quadratic time to parse them."""
    steps = (1 if match[0] in "[{" else -1 for match in re.finditer(r"[][{}]", text))
    return max(accumulate(steps), default=0)


MetricCurves = dict[str, list[tuple[int, float | str]]]


def _history(run: Run) -> MetricCurves:
    """Returns all values of each metric by step. Of steps that a restart repeats, only the newest values count.

    Rows of epochs have means over the epoch: they count only for metrics that no log point has.
    """
    points: MetricCurves = {}
    epochs: MetricCurves = {}
    restarts = RestartDetector()
    for row in metric_rows(run):
        step, metrics = row["step"], row["metrics"]
        if row.get("kind") == "train" and restarts.observe(row):
            for values in (*points.values(), *epochs.values()):
                _cut(values, step)
        found = epochs if row.get("kind") == "epoch" else points
        for name, value in metrics.items():
            if isinstance(value, int | float | str):
                for each in (points, epochs):  # names in the order of the file
                    each.setdefault(name, [])
                _cut(found[name], step)
                found[name].append((step, value))
    return {name: values for name in points if (values := points[name] or epochs[name])}


def _cut(values: list[tuple[int, float | str]], step: int) -> None:
    """Removes `step` and all later ones."""
    while values and values[-1][0] >= step:
        values.pop()


def _metric(values: Sequence[tuple[int, float | str]], better: Better | None) -> Metric:
    if not values:
        return Metric()
    finite = [
        (step, value) for step, value in values if not isinstance(value, str) and abs(value) <= LARGEST_VALUE
    ]
    series = Series()
    for at, number in finite:
        series.add(at, 0.0, float(number))
    curve = sparkline(series, _CURVE_WIDTH)
    if better is None or not finite:
        return Metric(last=values[-1][1], curve=curve)
    step, best = (min if better == "min" else max)(finite, key=lambda pair: pair[1])
    return Metric(last=values[-1][1], best=best, best_step=step, curve=curve)


def _direction(wanted: str) -> tuple[str, Better | None]:
    """Returns the name of a metric, and whether its minimum or maximum is best.

    >>> _direction("val/loss"), _direction("max:val/loss"), _direction("lr")
    (('val/loss', 'min'), ('val/loss', 'max'), ('lr', None))
    """
    for better in ("min", "max"):
        if wanted.startswith(f"{better}:"):
            return wanted[4:], better
    return wanted, better_of(wanted)


def better_of(name: str) -> Better | None:
    """Returns whether the minimum or the maximum of a metric is best, by its name; None if the name does not tell."""
    last = name.rpartition("/")[2].lower()
    return "min" if _LOWER.search(last) else "max" if _HIGHER.search(last) else None


def best_point(name: str, series: Series) -> tuple[float, int] | None:
    """Returns the best value of a curve and its step; None if the name does not tell which is best, or without values.

    >>> best_point("val/loss", Series(steps=[10, 20], lows=[0.3, 0.4], highs=[0.5, 0.6]))
    (0.3, 10)
    """
    better = better_of(name)
    values = series.lows if better == "min" else series.highs
    if better is None or not values:
        return None
    best = min(values) if better == "min" else max(values)
    return best, series.steps[values.index(best)]


def _default_metrics(histories: Sequence[MetricCurves]) -> dict[str, Better | None]:
    """Chooses the metrics to show by default: those with a known direction, validation first."""
    directed = {name: better for name, better in map(_direction, _union(histories)) if better}
    names = sorted(directed, key=lambda name: (name.startswith("train"), directed[name] != "min"))
    return {name: directed[name] for name in names[:_MAX_METRICS]}


def _union(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns all names in the order of their first occurrence."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except DAMAGED:  # keys of several kinds, or a number of too many digits
        return f"{type(value).__name__} {id(value)}"
