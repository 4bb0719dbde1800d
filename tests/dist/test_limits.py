"""What control groups allow, from the files that the kernel shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.system.limits import Limits, control_group_limits


@pytest.fixture
def control_groups(tmp_path: Path) -> Callable[..., Limits]:
    def read(entries: str, **files: str) -> Limits:
        for name, text in {"proc/self/cgroup": entries, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return control_group_limits(tmp_path)

    return read


def test_the_tightest_limit_on_the_way_up_counts(control_groups: Callable[..., Limits]) -> None:
    files = {
        "memory.max": "max",
        "slurm/memory.max": "9000000",
        "slurm/job_1/memory.max": "8000000\n",
        "slurm/job_1/step_0/memory.max": "max",
        "slurm/job_1/cpu.max": "600000 100000\n",
        "slurm/job_1/step_0/cpu.max": "450000 100000",
        "slurm/cpu.max": "max 100000",
    }
    found = control_groups(
        "0::/slurm/job_1/step_0\n", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    )
    assert found == Limits(memory=8000000, cpus=4.5)


def test_version_1(control_groups: Callable[..., Limits]) -> None:
    entries = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    file = "sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    assert control_groups(entries, **{file: "9223372036854771712"}).memory is None, (
        "that number means no limit"
    )
    assert control_groups(entries, **{file: "5000"}) == Limits(memory=5000, cpus=None)


def test_without_control_groups(tmp_path: Path) -> None:
    assert control_group_limits(tmp_path) == Limits(memory=None, cpus=None)
