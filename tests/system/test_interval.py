from __future__ import annotations

from typing import Any

import pytest

from headway.errors import UsageError
from headway.system.interval import Interval


@pytest.mark.parametrize(
    ("setting", "interval"),
    [
        ("10min", Interval(seconds=600.0)),
        ("1.5h", Interval(seconds=5400.0)),
        ("30 s", Interval(seconds=30.0)),
        ("2d", Interval(seconds=172_800.0)),
        (500, Interval(steps=500)),
        ("500 steps", Interval(steps=500)),
        ("1 step", Interval(steps=1)),
        ("2ep", Interval(epochs=2)),
        ("1 epoch", Interval(epochs=1)),
        ("3 epochs", Interval(epochs=3)),
    ],
)
def test_an_interval_is_a_time_steps_or_epochs(setting: Any, interval: Interval) -> None:
    assert Interval.parse(setting) == interval
    assert Interval.parse(str(interval)) == interval, "what is printed can be given"


@pytest.mark.parametrize(
    "setting", ["", "often", 0, -3, "0s", "1.5ep", "0 epochs", "10", "1 min 3s", None, 2.5, True]
)
def test_what_is_not_an_interval_is_refused(setting: Any) -> None:
    with pytest.raises(UsageError, match="is not a valid interval: give steps"):
        Interval.parse(setting)


def test_the_message_names_the_setting() -> None:
    with pytest.raises(UsageError, match=r"^val_every='daily' is"):
        Interval.parse("daily", name="val_every")
