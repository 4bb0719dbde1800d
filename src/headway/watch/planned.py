"""A finished or running run against its plan.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from headway.errors import UsageError
from headway.plan.report.saved_plan import Planned, PlannedKey, read_saved_plan
from headway.run import Run
from headway.system import jsonlines


class PlanComparison(NamedTuple):
    """One planned number and what the run's rows say; `measured` is None if they say nothing."""

    what: PlannedKey
    planned: Planned
    measured: float | None

    @property
    def differs(self) -> bool:
        return self.measured is not None and self.planned.outside(self.measured)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        plan = {"value": self.planned.value, "low": self.planned.low, "high": self.planned.high}
        return {"what": self.what, "planned": plan, "measured": self.measured, "differs": self.differs}


def compare_with_plan(run: Run) -> list[PlanComparison]:
    """Compares the median step time and the peak of memory with the run's plan.json."""
    if not run.plan_file.exists():
        raise UsageError(
            f"{run.path} has no plan.json; save one with `headway plan ... --save plan.json`, and give it to the run "
            'with pipe.enable_plan("plan.json")'
        )
    plan = read_saved_plan(run.plan_file)
    measured: dict[PlannedKey, float | None] = {"step": _step_s(run), "memory": _memory(run)}
    known = {key: plan.planned(key) for key in measured}
    return [
        PlanComparison(key, planned, measured[key]) for key, planned in known.items() if planned is not None
    ]


def _rows(run: Run, rank: int) -> Iterator[dict[str, Any]]:
    with suppress(OSError):  # the rank has written nothing yet
        yield from jsonlines.read(run.metrics_file(rank))


def _step_s(run: Run) -> float | None:
    """The median over the intervals between two log points of training with nothing between them."""
    found = []
    for before, after in pairwise(_rows(run, 0)):
        steps = after.get("step", 0) - before.get("step", 0)
        if before.get("kind") == after.get("kind") == "train" and steps > 0:
            found.append((after["time"] - before["time"]) / steps)
    return median(found) if found else None


def _memory(run: Run) -> float | None:
    """The most that a rank has allocated on its device; None on CPUs."""
    ranks = range(len(list(run.metrics_dir.glob("rank-*.jsonl"))))
    peaks = [row["memory_peak"] for rank in ranks for row in _rows(run, rank) if row.get("memory_peak")]
    return float(max(peaks)) if peaks else None
