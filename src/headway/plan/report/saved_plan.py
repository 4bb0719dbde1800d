"""A plan that was saved as plan.json, read again to be compared with the run that it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.errors import UsageError
from headway.plan.machine.hardware import GIB
from headway.plan.report.quantity import Unit, format_value

PlannedKey = Literal["step", "memory"]
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
        """Says how a measured number differs from the plan."""
        shown, planned = (format_value(number, self.unit) for number in (measured, self.value))
        low, high = (format_value(number, self.unit, like=self.value) for number in (self.low, self.high))
        return (
            f"{what}: {shown} measured, {planned} planned ({low} to {high}), {measured / self.value - 1:+.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """The content of plan.json.

    >>> read_saved_plan("plan.json").planned("step")    # doctest: +SKIP
    Planned(value=1.43, low=1.15, high=2.58, unit='s')
    """

    title: str
    content: Mapping[str, object]

    def planned(self, key: PlannedKey) -> Planned | None:
        """Returns what was planned for a step's time or for the memory of the fullest GPU; None if it was not."""
        name, unit = _ANSWERS[key]
        answers = self.content["answers"]
        answer = answers.get(name) if isinstance(answers, Mapping) else None
        if not isinstance(answer, Mapping):
            return None
        value, low, high = (float(answer[bound]) for bound in ("value", "low", "high"))
        return Planned(value=value, low=low, high=high, unit=unit)

    @property
    def fixes(self) -> list[str]:
        """The changes that would have fitted, with the GiB that they need, the cheapest first."""
        ways = self.content.get("remedies")
        found = [way for way in ways if way.get("fits")] if isinstance(ways, list) else []
        return [f"{way['change']} ({float(way['needed']) / GIB:.1f} GiB)" for way in found]


def read_saved_plan(path: str | Path) -> SavedPlan:
    """Reads the plan.json that `headway plan --save` wrote."""
    file = Path(path)
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}; write it with: headway plan ... --save {file}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("answers"), dict):
        raise UsageError(f"{file} is not a plan; write one with: headway plan ... --save {file}")
    return SavedPlan(title=str(content.get("title", file.stem)), content=content)
