"""Rows of the metrics file as sinks take them: numbers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Finds the log points from which a restart repeats steps.

    One step may have several log points, such as one that is due and one at the end of the epoch, perhaps with the same
    metrics. Only the first of them has trained samples, unless a restart repeats the step.

    >>> detector = RestartDetector()
    >>> rows = [{"step": step, "samples_per_second": n} for step, n in ((10, 64), (20, 64), (20, 0), (20, 64))]
    >>> [detector.observe(row) for row in rows]
    [False, False, False, True]
    """

    def __init__(self, step: int = -1) -> None:
        self._step = step

    def observe(self, row: Mapping[str, Any]) -> bool:
        """Takes the row of the next log point of training; returns whether it repeats earlier steps."""
        before, self._step = self._step, row["step"]
        return self._step < before or (self._step == before and bool(row.get("samples_per_second")))


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
