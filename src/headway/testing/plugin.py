"""The pytest plugin. Every pytest run on this machine imports it, so it is small and imports the rest on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headway.testing.pool import Pools

_pools: pytest.StashKey[Pools] = pytest.StashKey()


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
    from headway.testing.pool import Pools

    runner.run(pyfuncitem, pyfuncitem.config.stash.setdefault(_pools, Pools()))
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    pools = config.stash.get(_pools, None)
    if pools is not None:
        pools.close()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if it leaves a process, socket, file, shared memory, variable, handler or thread behind."""
    if request.node.get_closest_marker("headway_ranks"):
        yield  # each rank looks for itself; this process is not where the test runs
        return
    from headway.testing import leaks

    before = leaks.snapshot()
    yield
    found = leaks.since(before)
    if found:
        pytest.fail(leaks.describe(found), pytrace=False)
