"""The page on launching: its example of another scheduler works as it stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.launcher import targets
from headway.launcher.targets import ClusterTarget
from headway.schedulers.base import Scheduler

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "launch.md").read_text().partition("## Other schedulers")[2].partition("\n## ")[0]
sys.path.insert(0, str(ROOT / "tests" / "schedulers"))

from process_scheduler import ProcessScheduler  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The target with which the example calls `hw.launch`."""
    found: list[Any] = []
    modules = {name: ModuleType(name) for name in ("mypackage", "mypackage.scheduler", "mypackage.cluster")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    scheduler = type("MyScheduler", (ProcessScheduler,), {"name": "mypackage.scheduler:MyScheduler"})
    modules["mypackage.scheduler"].__dict__["MyScheduler"] = scheduler
    scope = modules["mypackage.cluster"].__dict__
    scope |= {"hw": SimpleNamespace(launch=lambda _, on: found.append(on)), "train": print}
    code = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)
    assert code is not None
    exec(code[1], scope)
    yield found[0]


def test_the_target_of_the_example_describes_a_job(launched: Any, tmp_path: Path) -> None:
    assert isinstance(launched, ClusterTarget)
    assert (launched.nodes, launched.nproc) == (2, 2)
    assert targets.from_dict(launched.to_dict()) == launched
    request = launched.request(name="digits", directory=tmp_path, log=Path("log/job.txt"))
    assert request.options == {"queue": "batch"}
    assert request.env == {"HEADWAY_SCHEDULER": "mypackage.scheduler:MyScheduler"}


def test_every_method_that_a_scheduler_needs_is_listed() -> None:
    table = "".join(line for line in SECTION.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", table)) == Scheduler.__abstractmethods__


def test_a_target_without_its_methods_cannot_be_made() -> None:
    class Unfinished(ClusterTarget):
        kind = "nowhere:Unfinished"

    with pytest.raises(TypeError, match=r"abstract.*nproc_per_node.*options.*scheduler"):
        Unfinished()  # type: ignore[abstract]
