"""Files of which the tests of other rooms see little."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from headway.system import files
from headway.system.files import open_unnamed


@pytest.mark.parametrize("old", [False, True], ids=["memory", "an old glibc"])
def test_a_file_without_a_name_holds_what_is_written(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        monkeypatch.delattr(os, "memfd_create")
    fd = open_unnamed("headway-test")
    try:
        os.truncate(fd, 4096)
        os.pwrite(fd, b"whole", 4091)
        assert os.pread(fd, 9, 4090) == b"\0whole" and not os.get_inheritable(fd)
        assert os.fstat(fd).st_nlink == 0 or not old
    finally:
        os.close(fd)


READ_OTHERWISE = {
    "cli/plan.py": "prints the file that it has just written",
    "dist/failure/heartbeat.py": "private memory of this launch",
    "dist/topology/machine.py": "/sys",
    "doctor/probes.py": "torch's own version, and the result of its own process",
    "launcher/agent/environment.py": "/sys",
    "launcher/agent/watchdog.py": "stacks in a private directory of this launch",
    "plan/machine/hardware.py": "part of the package",
    "plan/tracer/measurement.py": "the result of its own process",
    "plan/tracer/probe/machine.py": "a file that it has just written",
    "plan/tracer/request.py": "the result of its own process",
    "plan/user_files.py": "the bounded reader of plan, which takes pipes of the shell as well",
    "record/sources.py": "sources that this process has imported",
    "data/shards/file_tree.py": "files to pack, which were found to be regular files",
    "system/files.py": "the bounded reader, and a file that it has just written",
    "system/locks.py": "/proc",
    "system/ownership.py": "/proc",
    "dist/failure/hang.py": "/proc",
    "data/worker_init.py": "/proc",
    "train/diagnose/window_trace.py": "a trace that it has just written",
    "watch/web/assets.py": "part of the package",
    "system/stores/local.py": "objects of any size, which are not parsed",
    "record/sinks/feeder.py": "the end of the log of its own process",
    "data/fingerprint.py": "the beginning of shards that are open",
}
"""modules that open files to read them without `open_regular` or `read_regular`, and why none of them can hang"""


def test_all_that_is_parsed_is_read_by_one_bounded_reader_of_regular_files() -> None:
    """A pipe blocks, a device never ends, and a sparse file of terabytes takes no space on disk."""
    root = Path(files.__file__).parents[1]
    found: dict[str, list[int]] = {}
    for module in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and _reads(node):
                found.setdefault(module.relative_to(root).as_posix(), []).append(node.lineno)
    found = {name: lines for name, lines in found.items() if not name.startswith(("testing/", "demo/"))}
    assert {name: lines for name, lines in found.items() if name not in READ_OTHERWISE} == {}
    assert set(READ_OTHERWISE) - set(found) == set(), "these no longer read files"


def _reads(call: ast.Call) -> bool:
    """Whether a call opens a file by its path to read it."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""
    texts = [
        each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    if name in ("read_text", "read_bytes") and isinstance(call.func, ast.Attribute):
        return owner != "package" and len(call.args) < 2
    return name == "open" and (
        "rb" in texts or (owner == "" and "w" not in texts and isinstance(call.func, ast.Name))
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "zero", "sparse", "growing"])
def test_the_reader_is_bounded(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 40 << 30)
    else:  # more than its size
        path.symlink_to("/proc/self/maps")
    with pytest.raises(OSError, match=r"not a regular file|larger than"):
        files.read_regular(path, follow=True, most_bytes=100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of other users")
def test_links_of_others_are_followed_only_where_the_user_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.lchown(tmp_path / "link", 65534, 65534)
    with pytest.raises(OSError, match="a link of another user"):
        files.read_regular(tmp_path / "link")
    assert files.read_regular(tmp_path / "link", follow=True) == b"1"
