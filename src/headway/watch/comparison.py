"""Compares runs: the settings in which they differ, their states, and their metrics."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from typing import Any, Literal, final

import yaml

from headway.errors import UsageError, unknown_name
from headway.launcher.sweep import SweepMember
from headway.record import sources
from headway.record.sinks.rows import RestartDetector
from headway.run import Run
from headway.run.info import DAMAGED
from headway.run.plain import leaves
from headway.watch.runs import RunSummary, metric_rows, summarize
from headway.watch.view.series import LARGEST_VALUE, Series, sparkline
from headway.watch.view.source import open_regular, read_text

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
_MAX_UNTRACKED = 5
"""names of untracked files in a line"""
_CONFIG_BYTES = 1 << 16
"""takes a second to parse; no real settings are longer"""
_BEFORE_KEY = re.compile(rb"\n(?=[^\s:\-])")
"""the end of a line before a top-level key; list items and the values of long keys may begin a line, too"""
SETTINGS_CUT = "(settings)"
"""stands for the settings that were left out"""
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
    left_out: Sequence[str] = ()
    """other metrics of the runs, if the choice was left to `compare`"""
    code: str = ""
    """the commit, with a star for uncommitted changes; empty if they are the same, or if no run has recorded code"""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        metrics = {name: asdict(metric) for name, metric in self.metrics.items()}
        return self.summary.to_dict() | {
            "settings": dict(self.settings),
            "metrics": metrics,
            "left_out": list(self.left_out),
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
    differing = [
        name
        for name in _union(settings)
        if name == SETTINGS_CUT or len({_text(each.get(name)) for each in settings}) > 1
    ]
    histories = [_history(summary.run) for summary in found]
    wanted = dict(map(_direction, metrics)) or _default_metrics(histories)
    if unknown := [name for name in wanted if not any(name in history for history in histories)]:
        raise unknown_name("metric of these runs", unknown[0], _union(histories))
    left_out = [] if metrics else [name for name in _union(histories) if name not in wanted]
    codes = [_code(summary.run) for summary in found]
    same_code = len({(code.commit, code.is_dirty, code.diff) for code in codes}) < 2
    return [
        RunComparison(
            summary=summary,
            settings={name: each[name] for name in differing if name in each},
            metrics={name: _metric(history.get(name, []), better) for name, better in wanted.items()},
            left_out=left_out,
            code="" if same_code else code.label,
        )
        for summary, each, history, code in zip(found, settings, histories, codes, strict=True)
    ]


@final
@dataclass(frozen=True, kw_only=True)
class CodeComparison:
    """How the code of two runs differs, as far as git recorded it."""

    diff: list[str]
    """lines: the commits if they differ, and how the uncommitted changes differ"""
    not_compared: list[str]
    """lines: code that was not recorded, and untracked files"""
    is_whole: bool
    """whether the commits and all uncommitted changes of both runs were recorded"""

    @property
    def same(self) -> bool | None:
        """None if no difference was found, but not all of the code could be compared."""
        return False if self.diff else None if self.not_compared else True


def compare_code(one: Run, other: Run) -> CodeComparison:
    """Compares the code of two runs: their commits, and their uncommitted changes.

    >>> compare_code(one, other).diff
    ['commits differ: git diff 3f2a91c04b 77ab01d2e9', '--- x7k2: uncommitted changes', ...]
    """
    runs, codes = (one, other), (_code(one), _code(other))
    not_compared = [line for run, code in zip(runs, codes, strict=True) for line in code.gaps(run.id)]
    mine, theirs = codes
    is_whole = mine.is_whole and theirs.is_whole
    if not (mine.is_recorded and theirs.is_recorded):
        diff = _compare_sources(one, other)
        return CodeComparison(diff=diff, not_compared=not_compared, is_whole=is_whole)
    changes = difflib.unified_diff(
        mine.diff.splitlines(),
        theirs.diff.splitlines(),
        f"{one.id}: uncommitted changes",
        f"{other.id}: uncommitted changes",
        lineterm="",
    )
    diff = [*_commit_lines(mine, theirs), *changes]
    return CodeComparison(
        diff=diff or _compare_sources(one, other), not_compared=not_compared, is_whole=is_whole
    )


def compare_attempts(run: Run) -> CodeComparison:
    """Compares the code with which a run was started last with the other code that it was started with before.

    >>> compare_attempts(run).diff
    ['--- attempt 1: train.py', '+++ attempt 3: train.py', ...]
    """
    recorded = sources.recorded(run)
    if not recorded:
        return CodeComparison(
            diff=[], not_compared=[f"the code of {run.id} was not recorded"], is_whole=False
        )
    if len(recorded) == 1:
        return CodeComparison(
            diff=[], not_compared=[f"all attempts of {run.id} had the same code"], is_whole=False
        )
    (old, before), (new, now) = recorded[-2:]
    diff = sources.compare(before, now, names=(f"attempt {old}", f"attempt {new}"))
    return CodeComparison(diff=diff, not_compared=[], is_whole=True)


def _compare_sources(one: Run, other: Run) -> list[str]:
    """Returns how the files differ with which two runs were started last, if both have recorded them."""
    mine, theirs = sources.recorded(one), sources.recorded(other)
    return sources.compare(mine[-1][1], theirs[-1][1], names=(one.id, other.id)) if mine and theirs else []


def _commit_lines(mine: _Code, theirs: _Code) -> list[str]:
    if mine.commit == theirs.commit:
        return []
    if mine.commit and theirs.commit:
        return [f"commits differ: git diff {mine.commit[:10]} {theirs.commit[:10]}"]
    return [f"commits differ: {mine.commit[:10] or 'none yet'} and {theirs.commit[:10] or 'none yet'}"]


@final
@dataclass(frozen=True, kw_only=True)
class _Code:
    """The code of a run, as git recorded it."""

    commit: str
    """empty if there was none"""
    is_dirty: bool
    diff: str
    lacks_diff: bool
    """whether the file of the diff is missing"""
    untracked: list[str]
    note: str
    """which of this is incomplete, and why"""

    @property
    def is_recorded(self) -> bool:
        """Whether there is anything to compare: before the first commit, git records what is staged."""
        return bool(self.commit or self.diff)

    @property
    def is_whole(self) -> bool:
        """Whether the commit and all uncommitted changes were recorded."""
        return bool(self.commit) and not self.note and not self.lacks_diff

    @property
    def label(self) -> str:
        """The commit, with a star for uncommitted changes."""
        return f"{self.commit[:10] or 'no commit'}{'*' if self.is_dirty else ''}"

    def gaps(self, run: str) -> Iterator[str]:
        """Yields what of the code of this run cannot be compared."""
        if not self.is_recorded:
            yield f"the code of {run} was not recorded{self.note and f': {self.note}'}"
        elif self.note:
            yield f"the code of {run} was recorded only in part: {self.note}"
        elif self.lacks_diff:
            yield f"the uncommitted changes of {run} are missing in its directory"
        if self.untracked:
            names = ", ".join(self.untracked[:_MAX_UNTRACKED])
            more = len(self.untracked) - _MAX_UNTRACKED
            yield f"untracked files of {run} are not compared: {names}{f' and {more} more' if more > 0 else ''}"


def _code(run: Run) -> _Code:
    code = run.info().get("code")
    code = code if isinstance(code, dict) else {}  # another user's may hold anything
    untracked, diff = code.get("untracked"), read_text(run.path, run.diff_file, _DIFF_BYTES) or ""
    return _Code(
        commit=str(code.get("commit") or ""),
        is_dirty=bool(code.get("dirty")),
        diff=diff,
        lacks_diff=bool(code.get("diff")) and not diff,
        untracked=list(map(str, untracked)) if isinstance(untracked, list) else [],
        note=str(code.get("note") or ""),
    )


def settings_of(run: Run, member: SweepMember | None) -> dict[str, Any]:
    """Returns the settings of a run by their full names, including those that its sweep sets.

    >>> settings_of(run, None)
    {'lr': 0.0003, 'model.depth': 12}
    """
    text, is_whole = _config_text(run)
    try:
        recorded = yaml.safe_load(text) if _depth(text) <= _MAX_DEPTH else None
    except (*DAMAGED, RecursionError, yaml.YAMLError):
        recorded = None
    found = list(islice(leaves(recorded), _MAX_SETTINGS + 1))  # anchors can make a small file a huge tree
    flat = dict(found[:_MAX_SETTINGS])
    if not is_whole or len(found) > _MAX_SETTINGS:
        flat[SETTINGS_CUT] = f"too long: only its first {len(flat)} settings are compared"
    return flat | {k: v for k, v in (member.settings if member else {}).items() if k not in flat}


def _config_text(run: Run) -> tuple[str, bool]:
    """Returns the settings that a run recorded, and whether these are all: a long file ends before a top-level key."""
    file = open_regular(run.path, run.config_file)
    if file is None:
        return "", True
    with file:
        data = file.read(_CONFIG_BYTES + 1)
    is_whole = len(data) <= _CONFIG_BYTES
    if not is_whole:
        ends = [match.end() for match in _BEFORE_KEY.finditer(data)]
        data = data[: ends[-1] if ends else 0]
    return data.decode("utf-8", "replace"), is_whole


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
    """Returns the best value of a curve and its step; None without values, or if the name does not tell which is best.

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
