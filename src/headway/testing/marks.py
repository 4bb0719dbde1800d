"""`@ranks(n)`: the mark that makes pytest run a test on n processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headway.errors import UsageError

MARK = "headway_ranks"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How one test runs: on how many ranks, for how long, and whether what it leaves behind is a failure."""

    n: int
    timeout: float
    leaks: bool


def ranks(n: int, *, timeout: float = 60.0, leaks: bool = True) -> pytest.MarkDecorator:
    """Runs a test on `n` processes, each of which has joined the others with `headway.init()`, on the CPU.

    Marks functions, methods, classes, modules (`pytestmark = ranks(2)`) and single parameters alike. Fixtures are made
    once, in pytest's own process, and handed to all ranks; a rank that does not end within `timeout` seconds fails the
    test, and so does one that leaves a process, socket, file, variable or handler behind (unless `leaks=False`).

    >>> @ranks(2)
    ... def test_sum_over_ranks(tmp_path):
    ...     assert sum(headway.all_gather_object(headway.rank())) == 1
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"ranks({n!r}): the number of processes must be a whole number of at least 1")
    if not timeout > 0:
        raise UsageError(f"ranks({n}, timeout={timeout!r}): the timeout must be more than 0 seconds")
    mark: pytest.MarkDecorator = getattr(pytest.mark, MARK)
    return mark.with_args(Ranks(n=n, timeout=float(timeout), leaks=leaks))


def find(item: pytest.Item) -> Ranks | None:
    """The settings of a test that is to run on ranks; None for any other test."""
    mark = item.get_closest_marker(MARK)
    return mark.args[0] if mark else None
