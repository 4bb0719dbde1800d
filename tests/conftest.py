"""What all tests share."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import groups
import hypothesis
import pytest
from waiting import describe_load

pytest_plugins = ["pytester", "cpu_times", "fresh_logger", "left_behind"]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads spin otherwise, beside four workers
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nor do those that numpy starts at import

# by default an example may take 200 ms, which says something about the machine and nothing about the code
hypothesis.settings.register_profile("headway", deadline=None)
hypothesis.settings.load_profile("headway")

ROOT = Path(__file__).parents[1]
if os.environ.get("HEADWAY_FAULTS") != "full":
    # for all that is started from here, workers of pytest-xdist among them
    _path = [str(ROOT / "tests" / "helpers" / "startup"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, _path)))
_collected = pytest.StashKey[set[Path]]()


def pytest_configure() -> None:
    """A shell that starts us in the background has Ctrl-C ignored, also in all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    groups.name_file()


def pytest_unconfigure() -> None:
    groups.remove_file()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Notes all test files before -k or -m leaves some out, and which tests share a worker of pytest-xdist."""
    config.stash[_collected] = {item.path for item in items}
    items.sort(key=_when)  # stable: within a directory as before
    result = yield
    groups.publish(items)
    return result


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of garbage looks at it again, also not in forks."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> groups.GroupScheduling:
    return groups.GroupScheduling(config, log)


# Directories whose tests take longest, those first: what begins late should be short.
_SLOW = (
    "cluster", "schedulers", "plan", "faults", "testing", "train", "launcher", "checkpoint", "dist", "record", "data"
)  # fmt: skip
# It reads the cache of mypy, which `make check` fills meanwhile.
_LATE = "test_typing.py"


def _when(item: pytest.Item) -> tuple[bool, bool, int]:
    directory = item.path.relative_to(ROOT).parts[1]
    rank = _SLOW.index(directory) if directory in _SLOW else len(_SLOW)
    return item.get_closest_marker("alone") is not None, item.path.name == _LATE, rank


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    with groups.worker_at_work():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout counts
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("alone"):
        groups.wait_for_other_workers()
    return (yield)


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
