"""Fixtures that give tests a real Slurm cluster; see README.md and bench.py.

`cluster` has four nodes, and a signal to a step reaches all its processes (proctrack/linuxproc).
`cgroup_cluster` delivers signals to task leaders only, as most sites do. `any_cluster` runs the test on both.
They live as long as the session; after each test all jobs are cancelled and all nodes repaired.
`impatient_cluster` lives for one test, and soon misses a node that is lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from .bench import Cluster, why_not

_running = pytest.StashKey[list[Cluster]]()


def _running_cluster(
    request: pytest.FixtureRequest, proctrack: str, kept: Path, patience: int = 10
) -> Iterator[Cluster]:
    if reason := why_not(proctrack):
        if os.environ.get("CI") == "true" or os.environ.get("HEADWAY_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"the cluster tests must run here, but: {reason}", pytrace=False)
        pytest.skip(f"no cluster: {reason}")
    running = request.config.stash.setdefault(_running, [])
    cluster = Cluster.up(proctrack=proctrack, patience=patience)
    running.append(cluster)
    try:
        yield cluster
        if request.session.testsfailed:
            shutil.copytree(cluster.lab / "log", kept, dirs_exist_ok=True)
    finally:
        running.remove(cluster)
        cluster.down()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes; a signal to a step reaches every process in it."""
    yield from _running_cluster(request, "linuxproc", tmp_path_factory.mktemp("linuxproc-log"))


@pytest.fixture(scope="session")
def cgroup_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Four nodes; a signal to a step reaches the task leaders only, as on most clusters."""
    yield from _running_cluster(request, "cgroup", tmp_path_factory.mktemp("cgroup-log"))


@pytest.fixture(scope="session", params=["cluster", "cgroup_cluster"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """The test runs twice, once on each kind of cluster."""
    cluster: Cluster = request.getfixturevalue(request.param)
    return cluster


@pytest.fixture(params=["cgroup", *(["linuxproc"] if os.environ.get("HEADWAY_FAULTS") == "full" else [])])
def impatient_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """One for the test alone, which misses a lost node after 10 s. Both kinds only with HEADWAY_FAULTS=full."""
    yield from _running_cluster(request, request.param, tmp_path / "log", patience=3)


@pytest.fixture(autouse=True)
def _leave_clusters_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for cluster in request.config.stash.get(_running, []):
        cluster.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for cluster in item.config.stash.get(_running, []):
            report.sections.append((f"logs of the {cluster.proctrack} cluster", cluster.logs()))
    return report
