"""Intervals in settings: a number of steps, epochs or seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from headway.errors import UsageError

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d|ep|epochs?|steps?)")


@final
@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often something happens. Exactly one of the three is set."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, setting: str | int, *, name: str = "every") -> Interval:
        """Parses a setting; an integer means steps. `name` is the name of the setting, for error messages.

        >>> Interval.parse("10min"), Interval.parse(500), Interval.parse("1 epoch")
        (Interval(steps=None, epochs=None, seconds=600.0), Interval(steps=500, epochs=None, seconds=None), \
Interval(steps=None, epochs=1, seconds=None))
        """
        text = f"{setting} steps" if type(setting) is int else setting
        match = _INTERVAL.fullmatch(text) if isinstance(text, str) else None
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if unit in _SECONDS and number > 0:
            return cls(seconds=number * _SECONDS[unit])
        if number >= 1 and number.is_integer():
            return cls(epochs=int(number)) if unit.startswith("ep") else cls(steps=int(number))
        raise UsageError(
            f'{name}={setting!r} is not a valid interval: give steps (500 or "500 steps"), epochs ("1 epoch" or '
            '"1ep") or a time ("10min", "2h")'
        )

    def __str__(self) -> str:
        if self.seconds is not None:
            fitting = (unit for unit in ("d", "h", "min") if self.seconds >= _SECONDS[unit])
            unit = next(fitting, "s")
            return f"{self.seconds / _SECONDS[unit]:g} {unit}"
        count, noun = (self.steps, "step") if self.steps is not None else (self.epochs, "epoch")
        return f"{count} {noun}{'' if count == 1 else 's'}"
