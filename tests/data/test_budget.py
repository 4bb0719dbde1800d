"""What a node cache may take: control groups of both kinds, the machine's memory, the file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.data.cache import budget
from headway.errors import UsageError
from headway.system.limits import MemoryLimit, filesystem_type

GB = 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("50%", 500),
        ("0.5%", 5),
        ("256GB", 256 * GB),
        ("1.5 gib", 3 * 2**29),
        ("7", 7),
        (7, 7),
        ("2TB", 2000 * GB),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert budget.parse_budget(text, 1000) == size


@pytest.mark.parametrize("text", ["", "%", "-1GB", "1 parsec", "GB", "1e9", "0%", "100.1%", 0, -3])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(UsageError, match='give a share of the memory like "50%"'):
        budget.parse_budget(text, 1000)


def machine(root: Path, where: Path, files: dict[str, object]) -> Path:
    """A root directory with what the kernel of some machine would say; `where` is on a tmpfs there."""
    device = where.stat().st_dev
    mounts = f"25 1 {os.major(device)}:{os.minor(device)} / /dev/shm rw shared:3 - tmpfs tmpfs rw,size=9k\n"
    files = {
        "proc/meminfo": f"MemTotal: {100 * GB // 1024} kB\nMemAvailable: {80 * GB // 1024} kB\n",
        **files,
    }
    files["proc/self/mountinfo"] = mounts + str(files.get("proc/self/mountinfo", ""))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


def limits(root: Path, where: Path) -> list[tuple[float, float]]:
    """Beyond the file system's own."""
    _, *spaces = budget.limits_on(where, root)
    return [(space.limit / GB, space.free / GB) for space in spaces]


def test_memory_without_groups(tmp_path: Path) -> None:
    (limit, free), *others = limits(machine(tmp_path / "root", tmp_path, {}), tmp_path)
    assert limit == pytest.approx(100, rel=1e-6) and free == pytest.approx(80, rel=1e-6) and not others


def test_groups_of_the_second_kind_at_every_level(tmp_path: Path) -> None:
    """Half of what a job has in use are pages of files, which give way."""
    root = machine(
        tmp_path / "root",
        tmp_path,
        {
            "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
            "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
            "sys/fs/cgroup/slurm/memory.max": 64 * GB,
            "sys/fs/cgroup/slurm/memory.current": 60 * GB,
            "sys/fs/cgroup/slurm/job_7/memory.max": 32 * GB,
            "sys/fs/cgroup/slurm/job_7/memory.current": 20 * GB,
            "sys/fs/cgroup/slurm/job_7/memory.stat": f"anon 5\nactive_file {4 * GB}\ninactive_file {6 * GB}\nshmem 9\n",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job_7/step_0/memory.current": 20 * GB,
        },
    )
    assert limits(root, tmp_path)[1:] == [(32, 22), (64, 4)]


def test_groups_of_the_first_kind(tmp_path: Path) -> None:
    root = machine(
        tmp_path / "root",
        tmp_path,
        {
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "proc/self/cgroup": "4:memory:/slurm/uid_1/job_7\n3:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": 16 * GB,
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.usage_in_bytes": 10 * GB,
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.stat": f"cache 1\ntotal_active_file {GB}\n"
            f"total_inactive_file {GB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 10 * GB,
        },
    )
    assert limits(root, tmp_path)[1:] == [(16, 8)]


def test_groups_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The kernel names the group as the host does; only its own part of the tree is mounted."""
    root = machine(
        tmp_path / "root",
        tmp_path,
        {
            "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup rw - cgroup cgroup rw,memory\n",
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
            "sys/fs/cgroup/inner/memory.limit_in_bytes": 2 * GB,
            "sys/fs/cgroup/inner/memory.usage_in_bytes": GB,
            "sys/fs/cgroup/memory.limit_in_bytes": 4 * GB,
            "sys/fs/cgroup/memory.usage_in_bytes": 3 * GB,
            "memory.limit_in_bytes": 1,  # outside of the tree
            "memory.usage_in_bytes": 1,
        },
    )
    assert limits(root, tmp_path)[1:] == [(2, 1), (4, 1)]


def test_a_twentieth_of_every_limit_is_left_free() -> None:
    assert budget.spare_in(MemoryLimit(100, 30)) == 25
    assert budget.spare_in(MemoryLimit(100, 3)) < 0


def test_a_disk_is_not_memory(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", Path("/proc"), {})
    assert len(list(budget.limits_on(tmp_path, root))) == 1


def test_this_machine() -> None:
    shm = Path("/dev/shm")
    assert filesystem_type(shm) == "tmpfs" and budget.is_local(shm)
    assert 0 < budget.total_bytes(shm) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.1
    assert 0 <= budget.spare_bytes(shm) < budget.total_bytes(shm)
    assert not budget.is_local(Path("/proc"))
