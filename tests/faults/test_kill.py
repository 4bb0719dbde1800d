"""kill -9 at every failpoint of a save, of a deletion and of a search, on every rank: never too few checkpoints.

What is left is judged by a checker that shares no code with headway.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checker import judge

import headway.checkpoint
from headway import checkpoint

FORKER = Path(__file__).parents[1] / "checkpoint" / "forker.py"
SOURCES = Path(headway.checkpoint.__file__).parent


class Forker:
    """A process that forks ranks for one trial after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, *, ranks: int, fault: str, body: str) -> list[int]:
        """The exit codes of all ranks."""
        folder.mkdir()
        assert self._process.stdin is not None and self._process.stdout is not None
        trial = {"folder": str(folder), "ranks": ranks, "fault": fault, "body": body}
        self._process.stdin.write(json.dumps(trial) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def every_call(self, folder: Path, *, body: str, ranks: int) -> list[tuple[str, int, int]]:
        """All (name, rank, nth) of this room that one undisturbed trial passes."""
        fault = "nowhere:sleep=0"  # counts, and does nothing
        assert self.run(folder, ranks=ranks, fault=fault, body=body) == [0] * ranks
        found = []
        for rank in range(ranks):
            calls = json.loads((folder.parent / f"{folder.name}.calls-{rank}").read_text())
            found += [(name, rank, nth) for name in calls for nth in range(1, calls[name] + 1)]
        return [call for call in found if call[0].startswith(("checkpoint.", "retention."))]


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": compiled_shim(tmp_path_factory.mktemp("shim")),
    }
    command = [sys.executable, str(FORKER)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        yield Forker(process)
        process.kill()


def compiled_shim(folder: Path) -> str:
    """A library that can kill at any system call; empty where there is no compiler."""
    source = Path(__file__).with_name("shim.c")
    if shutil.which("gcc") is None:
        return ""
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "shim.so", source, "-ldl"]
    subprocess.run(command, check=True)
    return str(folder / "shim.so")


def points_in(*modules: str) -> set[str]:
    """The names of all failpoints in these modules."""
    text = "".join((SOURCES / f"{module}.py").read_text() for module in modules)
    return set(re.findall(r'failpoint\("([a-z_.]+)"\)', text))


def acknowledged(folder: Path) -> set[int]:
    files = folder.parent.glob(f"{folder.name}.acknowledged-*")
    return {int(line) for file in files for line in file.read_text().split()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_kill_at_every_point_of_a_save(tmp_path: Path, forker: Forker, ranks: int) -> None:
    calls = forker.every_call(tmp_path / "dry", body="save", ranks=ranks)
    in_reach = {point for point in points_in("keeping", "writing") if "set_aside" not in point}
    assert {name for name, _, _ in calls} == in_reach
    assert len(calls) >= 8 * ranks + 10
    expected, _ = judge(str(tmp_path / "dry"))
    outcomes = set()
    for number, (name, rank, nth) in enumerate(calls):
        folder, fault = tmp_path / f"save-{number}", f"{name}:rank={rank}:nth={nth}:kill9"
        codes = forker.run(folder, ranks=ranks, fault=fault, body="save")
        assert codes[rank] == -9, fault
        assert all(code not in (0, 999) for code in codes) or acknowledged(folder) == {1, 2}, (fault, codes)
        whole, problems = judge(str(folder))
        assert not problems, (fault, problems)
        assert 1 in whole and acknowledged(folder) <= whole.keys() <= {1, 2}, fault
        assert all(whole[step] == expected[step] for step in whole), fault  # the old or the new, to the bit
        assert checkpoint.find_valid(folder) == folder / f"step-{max(whole):012d}"
        outcomes.add(max(whole))
        checkpoint.save(folder, {"x": 1}, step=3)  # works, and sweeps
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], fault
    assert outcomes == {1, 2}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not here")
def test_kill_at_every_system_call_of_a_save(tmp_path: Path, forker: Forker) -> None:
    assert forker.run(tmp_path / "dry", ranks=1, fault="0", body="calls") == [0]
    count = int((tmp_path / "dry.count").read_text())
    assert count > 40
    expected, _ = judge(str(tmp_path / "dry"))
    newest = []
    for number in range(1, count + 1):
        folder = tmp_path / f"call-{number}"
        assert forker.run(folder, ranks=1, fault=str(number), body="calls") == [-9]
        whole, problems = judge(str(folder))
        assert not problems and whole.keys() in ({1}, {1, 2}), (number, problems)
        assert all(whole[step] == expected[step] for step in whole), number
        newest.append(max(whole))
        checkpoint.save(folder, {"x": 1}, step=3)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], number
    assert newest == sorted(newest) and set(newest) == {1, 2}  # one moment makes it valid, for good


def test_kill_at_every_point_of_a_deletion(tmp_path: Path, forker: Forker) -> None:
    calls = forker.every_call(tmp_path / "dry", body="prune", ranks=1)
    calls = [call for call in calls if call[0].startswith("retention.")]
    assert {name for name, _, _ in calls} == points_in("retention")
    for number, (name, _, nth) in enumerate(calls):
        folder, fault = tmp_path / f"prune-{number}", f"{name}:nth={nth}:kill9"
        assert forker.run(folder, ranks=1, fault=fault, body="prune") == [-9]
        whole, problems = judge(str(folder))
        assert not problems and {5, 6} <= whole.keys(), fault
        checkpoint.save(folder, {"x": 1}, step=7)  # sweeps what was half deleted
        assert not list(folder.glob(".del-*"))


def test_kill_while_damage_is_set_aside(tmp_path: Path, forker: Forker) -> None:
    calls = forker.every_call(tmp_path / "dry", body="find", ranks=2)
    calls = [call for call in calls if "set_aside" in call[0]]
    assert len(calls) == 2
    for name, rank, _ in calls:
        folder = tmp_path / name
        codes = forker.run(folder, ranks=2, fault=f"{name}:rank={rank}:kill9", body="find")
        assert codes[0] == -9 and codes[1] not in (0, 999)
        assert checkpoint.find_valid(folder) == folder / "step-000000000001"
        assert len(list(folder.glob("step-000000000002*"))) == 1  # nothing was lost
