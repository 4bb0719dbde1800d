"""A plan that was saved as plan.json, to compare it with its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

from headway.errors import UsageError
from headway.plan.checks import shown
from headway.plan.machine.hardware import GIB
from headway.plan.report.quantity import Unit, format_value
from headway.plan.user_files import read_json

PlannedKey = Literal["step", "memory"]
_LARGEST = 1e15
_MAX_BYTES = 16 << 20
_ANSWERS: dict[str, tuple[str, Unit]] = {"step": ("time.step", "s"), "memory": ("memory.allocated", "bytes")}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One number of a plan with its interval."""

    value: float
    low: float
    high: float
    unit: Unit

    def outside(self, measured: float) -> bool:
        """Whether a measured number is not in the interval."""
        return not self.low <= measured <= self.high

    def sentence(self, what: str, measured: float) -> str:
        """Returns a sentence on how a measured number differs from the plan."""
        shown, planned = (format_value(number, self.unit) for number in (measured, self.value))
        low, high = (format_value(number, self.unit, like=self.value) for number in (self.low, self.high))
        return (
            f"{what}: {shown} measured, {planned} planned ({low} to {high}), {measured / self.value - 1:+.0%}"
        )


class PlanComparison(NamedTuple):
    """One planned number, and the measured one; None if it was not measured."""

    what: PlannedKey
    planned: Planned
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """The measured number over the planned one."""
        return None if self.measured is None else self.measured / self.planned.value

    @property
    def differs(self) -> bool:
        """Whether the measured number is outside the interval of the plan."""
        return self.measured is not None and self.planned.outside(self.measured)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        plan = {"value": self.planned.value, "low": self.planned.low, "high": self.planned.high}
        return {"what": self.what, "planned": plan, "measured": self.measured, "differs": self.differs}


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """The content of plan.json.

    >>> read_saved_plan("plan.json").planned("step")    # doctest: +SKIP
    Planned(value=1.43, low=1.15, high=2.58, unit='s')
    """

    title: str
    content: Mapping[str, object]

    def planned(self, key: PlannedKey) -> Planned | None:
        """Returns the planned step time or memory of the fullest GPU; None if the plan has none."""
        name, unit = _ANSWERS[key]
        answers = self.content.get("answers")
        answer = answers.get(name) if isinstance(answers, Mapping) else None
        if not isinstance(answer, Mapping):
            return None
        value = answer.get("value")
        bounds = [answer.get(bound, value) for bound in ("low", "high")]
        if not _is_amount(value) or not all(map(_is_amount, bounds)):
            return None  # the file was edited; readers of runs show the rest
        low, high = map(float, bounds)
        return Planned(value=float(value), low=low, high=high, unit=unit)

    def compare(self, measured: Mapping[PlannedKey, float | None]) -> list[PlanComparison]:
        """Compares measured numbers with planned ones, by key; keys that were not planned are left out."""
        known = {key: self.planned(key) for key in measured}
        return [
            PlanComparison(key, planned, measured[key])
            for key, planned in known.items()
            if planned is not None
        ]

    @property
    def fixes(self) -> list[str]:
        """The changes that make the plan fit, with the GiB that they need, the cheapest first."""
        ways = self.content.get("remedies")
        found = [way for way in ways if way.get("fits")] if isinstance(ways, list) else []
        return [f"{way['change']} ({float(way['needed']) / GIB:.1f} GiB)" for way in found]


def _is_amount(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a positive number that can be shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def read_saved_plan(path: str | Path) -> SavedPlan:
    """Reads the plan.json that `headway plan --save` wrote."""
    file = Path(path)
    what = f"a plan that was written with: headway plan ... --save {file.name}"
    content = read_json(file, what=what, max_bytes=_MAX_BYTES)
    if not isinstance(content, dict) or not isinstance(content.get("answers"), dict):
        raise UsageError(f"{file} is not a plan; write one with: headway plan ... --save {file}")
    plan = SavedPlan(title=str(content.get("title", file.stem)), content=content)
    for key, (name, _) in _ANSWERS.items():
        if name in content["answers"] and plan.planned(key) is None:  # type: ignore[arg-type]
            raise UsageError(
                f"{file}: {name} is {shown(content['answers'][name])}; expected a value, low and high above 0; "
                f"write it again with: headway plan ... --save {file.name}"
            )
    return plan
