"""A snapshot of a run as plain values for the page: the blocks of `headway watch`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headway.watch.comparison import best_point, better_of
from headway.watch.terminal.screen import ordered_curves
from headway.watch.view import Snapshot
from headway.watch.view.series import Series, resample

_SPARK_POINTS = 40
_MAX_RANKS = 64
_MAX_NODES = 64
_MAX_MESSAGES = 100


def blocks(snapshot: Snapshot) -> dict[str, Any]:
    """Returns all that the page of a run shows, except curves and files."""
    planned = next((each.planned.value for each in snapshot.plan if each.what == "step"), None)
    return {
        "time": snapshot.time,
        "header": asdict(snapshot.header) | {"progress": snapshot.header.progress},
        "learning": [digest(name, snapshot.curves[name]) for name in ordered_curves(snapshot.curves)],
        "speed": asdict(snapshot.speed) | {"planned_step_s": planned},
        "ranks": [asdict(row) for row in snapshot.ranks[:_MAX_RANKS]],
        "rank_count": len(snapshot.ranks),
        "stragglers": [row.rank for row in snapshot.ranks if row.is_straggler][:_MAX_RANKS],
        "nodes": list(snapshot.nodes[:_MAX_NODES]),
        "node_count": len(snapshot.nodes),
        "data": [asdict(row) for row in snapshot.data],
        "safety": asdict(snapshot.safety),
        "messages": [asdict(message) for message in snapshot.messages[-_MAX_MESSAGES:]],
        "failure": asdict(snapshot.failure) if snapshot.failure else None,
    }


def digest(name: str, series: Series) -> dict[str, Any]:
    """Returns a curve in a few numbers: the newest and the best value, its range, and a sparkline."""
    best, best_step = best_point(name, series) or (None, None)
    return {
        "name": name,
        "last": series.last,
        "low": min(series.lows, default=None),
        "high": max(series.highs, default=None),
        "better": better_of(name),
        "best": best,
        "best_step": best_step,
        "non_finite": series.non_finite,
        "spark": resample(series, min(_SPARK_POINTS, len(series.steps))),
    }


def to_json(value: object) -> bytes:
    """Returns JSON that every browser reads: numbers that are not finite become text, as in the files of a run."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 1 << 53:
        # JavaScript has no integers beyond, and no numbers beyond 1e308
        return float(value) if abs(value) < 1 << 1023 else "inf" if value > 0 else "-inf"
    return value if value is None or isinstance(value, str | int | float) else str(value)
