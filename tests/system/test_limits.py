"""What control groups allow, from the files that the kernel shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.system import limits
from headway.system.limits import (
    ResourceLimits,
    _Mount as Mount,
    boot_id,
    filesystem_type,
    resource_limits,
    usable_cpus,
)


@pytest.fixture
def control_groups(tmp_path: Path) -> Callable[..., ResourceLimits]:
    def read(entries: str, **files: str) -> ResourceLimits:
        for name, text in {"proc/self/cgroup": entries, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return resource_limits(tmp_path)

    return read


def test_the_tightest_limit_on_the_way_up_counts(control_groups: Callable[..., ResourceLimits]) -> None:
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
    assert found == ResourceLimits(memory=8000000, cpus=4.5)


def test_version_1(control_groups: Callable[..., ResourceLimits]) -> None:
    entries = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    file = "sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    assert control_groups(entries, **{file: "9223372036854771712"}).memory is None, (
        "that number means no limit"
    )
    assert control_groups(entries, **{file: "5000"}) == ResourceLimits(memory=5000, cpus=None)


def test_version_1_limits_the_cpus_by_a_quota_and_a_period(
    control_groups: Callable[..., ResourceLimits],
) -> None:
    entries, folder = "5:cpu,cpuacct:/job\n", "sys/fs/cgroup/cpu/job"
    period = {f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert control_groups(entries, **period, **{f"{folder}/cpu.cfs_quota_us": "250000\n"}).cpus == 2.5
    assert control_groups(entries, **period, **{f"{folder}/cpu.cfs_quota_us": "-1\n"}).cpus is None


def test_without_control_groups(tmp_path: Path) -> None:
    assert resource_limits(tmp_path) == ResourceLimits(memory=None, cpus=None)


def test_control_groups_limit_the_cpus() -> None:
    all_of_them = len(os.sched_getaffinity(0))
    for limit, usable in ((None, all_of_them), (1.5, 1), (0.2, 1), (1000.0, all_of_them)):
        assert usable_cpus(ResourceLimits(memory=None, cpus=limit)) == usable


def test_types_of_file_systems() -> None:
    assert filesystem_type(Path("/proc/self")) == "proc"
    assert filesystem_type(Path("/dev/shm")) == "tmpfs"
    assert filesystem_type(Path("/")) == next(
        part.fstype for part in psutil.disk_partitions(all=True) if part.mountpoint == "/"
    )


def test_a_file_whose_device_is_not_mounted_belongs_to_the_mount_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs gives each subvolume a device of its own, which no mount has."""
    monkeypatch.setattr(limits, "_mounts", lambda _: iter([Mount("0:0", "/", "/", "btrfs", [])]))
    assert filesystem_type(tmp_path) == "btrfs"
    monkeypatch.setattr(limits, "_mounts", lambda _: iter([]))
    assert filesystem_type(Path("/proc/self")) == "proc", "without /proc/self/mountinfo, psutil is asked"


def test_the_boot_has_a_name() -> None:
    assert boot_id() == boot_id() != ""
