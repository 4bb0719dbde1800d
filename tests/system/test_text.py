from __future__ import annotations

import pytest

from headway.errors import UsageError, closest, unknown_name
from headway.system import text


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (7e15, "7000.0 TB")],
)
def test_sizes_have_decimal_units(count: float, shown: str) -> None:
    assert text.format_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (86_399, "23h59m"), (86_400, "1d00h")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert text.format_duration(seconds) == shown


def test_a_long_list_is_cut_and_counted() -> None:
    assert text.shorten_list(range(16)) == ", ".join(map(str, range(16)))
    assert text.shorten_list(range(17), limit=16).endswith("14, 15, ... and 1 more")
    assert text.shorten_list({"a": 1}) == "a"
    assert text.shorten_list([]) == ""


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("presicion", "precision"),
        ("PRECISION", "precision"),
        ("acc", "accumulate"),
        ("accumulate_grad_batches", "accumulate"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_closest_name(name: str, close: str | None) -> None:
    assert closest(name, ["accumulate", "precision", "limit_train_batches", "Batch"]) == close
    assert closest("bach", ["accumulate", "Batch"]) == "Batch", "the name as it is written"


def test_an_unknown_name_is_a_usage_error_with_a_suggestion() -> None:
    error = unknown_name("setting of Slurm", "partion", ["nodes", "partition"])
    assert isinstance(error, UsageError)
    assert str(error) == (
        "'partion' is not a valid setting of Slurm (did you mean 'partition'?); valid: nodes, partition"
    )
    assert "did you mean" not in str(unknown_name("key", "zzz", ["nodes"]))
    assert str(unknown_name("key", 7, range(100))).endswith("38, 39, ... and 60 more")
