"""The pytest plugin.

Every pytest run in this environment imports it, so it is small and imports the rest on demand. All tests of a pytest
process share its pools of ranks, one per size; each worker of pytest-xdist is such a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headway.testing.pool import RankPools

_pools: pytest.StashKey[RankPools] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "headway_ranks: runs the test on several processes; use headway.testing.ranks"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("headway_ranks"):
        from headway.testing import runner

        runner.check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("headway_ranks") is None:
        return None
    from headway.testing import runner
    from headway.testing.pool import RankPools

    runner.run(pyfuncitem, pyfuncitem.config.stash.setdefault(_pools, RankPools()))
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    pools = config.stash.get(_pools, None)
    if pools is not None:
        pools.close()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if it leaves a process, socket, file, shared memory, variable, handler or thread behind."""
    if request.node.get_closest_marker("headway_ranks"):
        yield  # each rank checks itself; the test does not run in this process
        return
    from headway.testing import leaks

    before = leaks.snapshot()
    yield
    found = leaks.since(before)
    if found:
        pytest.fail(leaks.describe(found), pytrace=False)
