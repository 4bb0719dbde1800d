"""Which tests share a worker of pytest-xdist: those that share what is costly to set up.

pytest-xdist's own mark, `xdist_group`, has no effect with pytest 9.2, which no longer keeps a test's id where the mark
is written to. So the workers, which collect the tests, write the groups to a file that their controller reads.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cached_property
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from headway.testing.marks import find

_VARIABLE = "PYTEST_GROUPS_FILE"


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
        Path(os.environ.pop(_VARIABLE)).unlink(missing_ok=True)


def publish(items: list[pytest.Item]) -> None:
    """Writes the groups of all tests, in a worker. The file appears as a whole: all workers write the same."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        groups = {item.nodeid: group for item in items if (group := group_of(item))}
        path = Path(os.environ[_VARIABLE])
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(groups))
        part.replace(path)


def group_of(item: pytest.Item) -> str | None:
    """Returns the group of a test: a SLURM cluster, a pool of ranks, or a file whose tests share a fixture."""
    fixtures = getattr(item, "_fixtureinfo", None)
    found = [each for named in fixtures.name2fixturedefs.values() for each in named] if fixtures else []
    names = {each.argname for each in found} | _parameters(item)
    if {"cgroup_cluster", "impatient_cluster"} & names:
        return "cluster-cgroup"
    if "cluster" in names:
        return "cluster-linuxproc"
    if any(each.scope != "function" and each.baseid.startswith("tests") for each in found):
        return item.nodeid.partition("::")[0]
    ranks = find(item)
    return f"ranks-{ranks.nproc}" if ranks else None


def _parameters(item: pytest.Item) -> set[str]:
    return set(map(str, item.callspec.params.values())) if hasattr(item, "callspec") else set()
