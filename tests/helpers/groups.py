"""Which tests share a worker of pytest-xdist: those that share what is costly to set up. Which run with none beside.

pytest-xdist's own mark, `xdist_group`, has no effect with pytest 9.2, which no longer keeps a test's id where the mark
is written to. So the workers, which collect the tests, write the groups to a file that their controller reads.

Tests marked `alone` come last, in one worker, which waits until all others have ended. Each worker shares a lock on a
second file while it runs tests; the kernel takes it from a worker that is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from headway.testing.marks import find

_VARIABLE = "PYTEST_GROUPS_FILE"
_OTHERS_S = 600.0
"""how long the last tests of the other workers may take, those on the cluster included"""
_at_work: list[int] = []
"""the open lock file of this worker, once it runs tests"""


class GroupScheduling(LoadScopeScheduling):
    """Sends the tests of a group to one worker, and every other test to whichever worker is free."""

    @cached_property
    def _groups(self) -> dict[str, str]:
        groups: dict[str, str] = json.loads(Path(os.environ[_VARIABLE]).read_text())
        return groups

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)


def name_file() -> None:
    """Names the file, in the process that starts the workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[_VARIABLE] = f"{tempfile.gettempdir()}/pytest-groups-{os.getpid()}.json"


def remove_file() -> None:
    """Removes the file at the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        path = Path(os.environ.pop(_VARIABLE))
        path.unlink(missing_ok=True)
        _lock_file(path).unlink(missing_ok=True)


@contextmanager
def worker_at_work() -> Iterator[None]:
    """Lets tests that are marked `alone` wait for this worker, if it is one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    lock = os.open(_lock_file(Path(os.environ[_VARIABLE])), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)
    _at_work.append(lock)
    try:
        yield
    finally:
        _at_work.remove(lock)
        fcntl.flock(lock, fcntl.LOCK_UN)  # also where a process that a test has left inherited the file
        os.close(lock)


def wait_for_other_workers() -> None:
    """Returns when no other worker runs tests, or has hung for so long that somebody must go on."""
    deadline = time.monotonic() + _OTHERS_S
    while _at_work and not _is_ours(_at_work[0]) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_ours(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the attempt may have released it
        return False
    return True


def _lock_file(groups_file: Path) -> Path:
    return groups_file.with_suffix(".lock")


def publish(items: list[pytest.Item]) -> None:
    """Writes the groups of all tests, in a worker. The file appears as a whole: all workers write the same."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        groups = {item.nodeid: group for item in items if (group := group_of(item))}
        path = Path(os.environ[_VARIABLE])
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(groups))
        part.replace(path)


def group_of(item: pytest.Item) -> str | None:
    """Returns the group of a test: the last one, a SLURM cluster, a pool of ranks, or a file with a shared fixture."""
    if item.get_closest_marker("alone"):
        return "alone"
    fixtures = getattr(item, "_fixtureinfo", None)
    found = [each for named in fixtures.name2fixturedefs.values() for each in named] if fixtures else []
    names = {each.argname for each in found} | _parameters(item)
    if "impatient_cluster" in names:
        return "cluster-impatient"
    if "cgroup_cluster" in names:
        return "cluster-cgroup"
    if "cluster" in names:
        return "cluster-linuxproc"
    if any(each.scope != "function" and each.baseid.startswith("tests") for each in found):
        return item.nodeid.partition("::")[0]
    ranks = find(item)
    return f"ranks-{ranks.nproc}" if ranks else None


def _parameters(item: pytest.Item) -> set[str]:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {each for each in values if isinstance(each, str)}
