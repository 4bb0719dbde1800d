"""Rows of the metrics file as sinks take them: numbers by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, final


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by name: metrics under their own, the rest under `headway/`.

    >>> scalars({"kind": "train", "step": 5, "metrics": {"train/loss": 0.5, "hits": [1, 2]}, "memory_peak": 90})
    {'train/loss': 0.5, 'hits/0': 1.0, 'hits/1': 2.0, 'headway/memory_peak': 90.0}
    """
    prefix = "epoch/" if row["kind"] == "epoch" else ""
    found = {prefix + name: value for name, value in _numbers(row.get("metrics", {}))}
    known = ("kind", "time", "stage", "epoch", "step", "metrics")
    rest = {key: value for key, value in row.items() if key not in known}
    inside = "checkpoint/" if row["kind"] == "checkpoint" else ""
    return found | {f"headway/{inside}{name}": value for name, value in _numbers(rest)}


@final
class RestartDetector:
    """Finds the log points from which on a restart repeats steps.

    One step may have several log points, such as one that is due and one at the end of the epoch. They are of different
    metrics, unless a restart repeats them.

    >>> detector = RestartDetector()
    >>> [detector.observe(step, [name]) for step, name in ((10, "loss"), (20, "loss"), (20, "fid"), (20, "loss"))]
    [False, False, False, True]
    """

    def __init__(self, step: int = -1, names: Collection[str] = ()) -> None:
        self._step, self._names = step, names

    def observe(self, step: int, names: Collection[str]) -> bool:
        """Takes the next log point, with the names of its metrics; returns whether it repeats what was before."""
        before, self._step = self._step, step
        is_repeated = step < before or (step == before and not set(names).isdisjoint(self._names))
        self._names = {*self._names, *names} if step == before and not is_repeated else names
        return is_repeated


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    match value:
        case dict():
            for key, part in value.items():
                yield from _numbers(part, f"{name}/{key}" if name else str(key))
        case list():
            for place, part in enumerate(value):
                yield from _numbers(part, f"{name}/{place}")
        case bool() | int() | float():
            yield name, float(value)
        case "nan" | "inf" | "-inf":  # JSON has no such numbers
            yield name, float(value)
