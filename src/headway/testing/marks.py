"""`@ranks(nproc)`: the mark that makes pytest run a test on several processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headway.errors import UsageError

MARK = "headway_ranks"


@dataclass(frozen=True, kw_only=True)
class RanksMark:
    """How one test runs: on how many ranks, for how long, and whether what it leaves behind is a failure."""

    nproc: int
    timeout: float
    leaks: bool


def ranks(nproc: int, *, timeout: float = 60.0, leaks: bool = True) -> pytest.MarkDecorator:
    """Runs a test on `nproc` processes that have joined each other with `headway.init()`, on the CPU.

    Marks functions, methods, classes, modules (`pytestmark = ranks(2)`) and single parameters. Fixtures are made once,
    in pytest's own process, and sent to all ranks. A rank that does not end within `timeout` seconds fails the test; so
    does one that leaves a process, socket, file, variable or handler behind, unless `leaks=False`.

    >>> @ranks(2)
    ... def test_sum_over_ranks(tmp_path):
    ...     assert sum(headway.all_gather_object(headway.rank())) == 1
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise UsageError(f"ranks({nproc!r}): nproc must be an integer of at least 1")
    if not timeout > 0:
        raise UsageError(f"ranks({nproc}, timeout={timeout!r}): the timeout must be more than 0 seconds")
    mark: pytest.MarkDecorator = getattr(pytest.mark, MARK)
    return mark.with_args(RanksMark(nproc=nproc, timeout=float(timeout), leaks=leaks))


def find(item: pytest.Item) -> RanksMark | None:
    """Returns the settings of a test that is marked with `ranks`; None for any other test."""
    mark = item.get_closest_marker(MARK)
    return mark.args[0] if mark else None
