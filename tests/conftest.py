"""What all tests share."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from waiting import describe_load

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
_collected = pytest.StashKey[set[Path]]()


def pytest_configure() -> None:
    """A shell that starts us in the background has Ctrl-C ignored, also in all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Notes all test files before -k or -m leaves some out, and says which tests share a worker of pytest-xdist."""
    config.stash[_collected] = {item.path for item in items}
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    return (yield)


def _group(item: pytest.Item) -> str:
    """Tests of a file share what they set up; those of tests/cluster share a real SLURM cluster of each kind."""
    path = item.path.relative_to(ROOT)
    fixtures = set(getattr(item, "fixturenames", ()))
    if path.parts[1] != "cluster" or not any("cluster" in name for name in fixtures):
        return path.as_posix()
    parameters = getattr(item, "callspec", None)
    kinds = {"cgroup_cluster", "impatient_cluster"} & (
        fixtures | set(map(str, parameters.params.values() if parameters else ()))
    )
    return "cluster-cgroup" if kinds else "cluster-linuxproc"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails says how busy the machine was: it may have run out of time."""
    report = yield
    if report.failed:
        report.sections.append(("machine", describe_load()))
    return report


@pytest.fixture
def collected_files(request: pytest.FixtureRequest) -> set[Path]:
    """The test files that pytest collects when it is started as `make test` starts it."""
    if {Path(arg).resolve() for arg in request.config.args} <= {ROOT, ROOT / "tests"}:
        return request.config.stash[_collected]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {ROOT / file for file in re.findall(r"^(tests/[^:\s]+\.py):", done.stdout, re.MULTILINE)}
