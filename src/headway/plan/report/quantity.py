"""A number with its interval, unit, formula and source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from headway.plan.machine.hardware import GIB

ValueSource = Literal["trace", "formula", "measured", "datasheet", "given"]
Unit = Literal[
    "",
    "bytes",
    "s",
    "tokens/s",
    "samples/s",
    "FLOP",
    "FLOP/token",
    "share",
    "hours",
    "kWh",
    "money",
    "bytes/s",
]

UNBOUNDED = 1000.0
"""An upper bound this many times the value means that there is no known upper bound."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One answer of an estimate, with the interval that it lies in.

    >>> str(Quantity(value=3 * 2**30, low=2.9 * 2**30, high=3.3 * 2**30, unit="bytes", formula="a + b"))
    '3.00 GiB (2.90 to 3.30)'
    """

    value: float
    low: float
    high: float
    unit: Unit = ""
    formula: str = ""
    source: ValueSource = "formula"

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} is not between {self.low} and {self.high}")

    def __str__(self) -> str:
        shown = format_value(self.value, self.unit)
        if self.low == self.high:
            return shown
        if self.low == self.value and self.high >= UNBOUNDED * self.value:
            return f"at least {shown}"
        low, high = (
            format_value(bound, self.unit, like=self.value).split(" ")[0] for bound in (self.low, self.high)
        )
        return f"{shown} ({low} to {high})"

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self)


def exact(value: float, unit: Unit = "", *, formula: str, source: ValueSource = "formula") -> Quantity:
    """Creates a quantity without uncertainty."""
    return Quantity(value=value, low=value, high=value, unit=unit, formula=formula, source=source)


def approximate(
    value: float, low: float, high: float, unit: Unit = "", *, formula: str, source: ValueSource = "formula"
) -> Quantity:
    """Creates a quantity whose interval reaches from `low` to `high` times its value."""
    return Quantity(
        value=value, low=value * low, high=value * high, unit=unit, formula=formula, source=source
    )


_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_FLOPS = ((1e21, "ZFLOP"), (1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"),
          (1.0, "FLOP"))  # fmt: skip
_BYTES = ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SECONDS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_value(value: float, unit: Unit, *, like: float | None = None) -> str:
    """Formats a number with its unit. Memory has binary units, rates of bytes have decimal ones.

    The unit's prefix follows `like` if it is given, so that bounds are shown in the unit of their value.

    >>> format_value(3 << 30, "bytes"), format_value(2.5e9, "bytes/s")
    ('3.00 GiB', '2.50 GB/s')
    >>> format_value(0.9997, "share"), format_value(5.1e10, "FLOP/token")
    ('99.97 %', '51.00 GFLOP/token')
    """
    size = abs(value if like is None else like)
    if unit == "bytes":
        return _scaled(value, size, _BYTES)
    if unit == "bytes/s":
        return _scaled(value, size, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")))
    if unit == "s":
        return _scaled(value, size, _SECONDS)
    if unit in ("FLOP", "FLOP/token"):
        return _scaled(value, size, _FLOPS) + unit[len("FLOP") :]
    if unit == "share":
        fine = 0.999 <= size < 1 or 0 < size < 0.001  # 99.97 % is not 100 %, and 0.02 % is not 0 %
        return f"{100 * value:.{2 if fine else 1}f} %"
    if unit == "hours":
        return f"{value:,.1f} h" if size < 1000 else f"{value:,.0f} h"
    if unit in ("tokens/s", "samples/s"):
        return f"{value:,.0f} {unit}" if size >= 100 else f"{value:,.2f} {unit}"
    if unit in ("kWh", "money"):
        return f"{value:,.0f} {'kWh' if unit == 'kWh' else ''}".strip()
    for factor, name in _COUNTS:
        if size >= factor:
            return f"{value / factor:,.2f} {name}"
    return f"{value:,.4g}"


def _scaled(value: float, size: float, units: tuple[tuple[float, str], ...]) -> str:
    factor, name = next(((f, n) for f, n in units if size >= f), units[-1])
    number = value / factor
    return f"{number:,.2f} {name}" if abs(number) < 100 else f"{number:,.0f} {name}"
