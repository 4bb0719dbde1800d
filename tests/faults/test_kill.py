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
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest
from checker import judge

import headway.checkpoint
from headway import checkpoint

FORKER = Path(__file__).parents[1] / "checkpoint" / "forker.py"
SOURCES = Path(headway.checkpoint.__file__).parent
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
RANKS = [1, 2, 3] if FULL else [2]


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
        """All (name, rank, nth) of this package that one trial without a fault passes."""
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


@pytest.mark.parametrize("ranks", RANKS)
def test_kill_at_every_point_of_a_save(tmp_path: Path, forker: Forker, ranks: int) -> None:
    calls = forker.every_call(tmp_path / "dry", body="save", ranks=ranks)
    # tests/train/test_post_stage.py kills a save that replaces another of its step
    elsewhere = ("set_aside", "replacing")
    in_reach = {point for point in points_in("api", "write/disk") if not point.endswith(elsewhere)}
    assert {name for name, _, _ in calls} == in_reach | {"checkpoint.begin"}
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


# --- saving beside the training: a helper process dies, or its rank and it


SAMPLE = [
    ("before_directory", 0), ("after_rename", 0), ("before_fsync", 1), ("before_rename", 0), ("mid_file", 1),
    ("committed", 0), ("rank_written", 1), ("after_manifest", 0),
]  # fmt: skip


def calls_of_helpers(ranks: int, sample: int) -> Iterator[tuple[str, int, Iterable[int]]]:
    """Failpoints that a helper passes, the rank, and the numbers of calls to try until it makes no more."""
    if not FULL:
        yield from ((f"checkpoint.{point}", rank, [1]) for point, rank in SAMPLE[:sample])
        return
    for rank in range(ranks):
        yield from ((point, rank, count(1)) for point in sorted(points_in("write/disk")))


def assert_old_or_new(folder: Path, expected: dict[int, object], fault: str) -> int:
    whole, problems = judge(str(folder))
    assert not problems, (fault, problems)
    assert 1 in whole and acknowledged(folder) <= whole.keys() <= {1, 2}, fault
    assert all(whole[step] == expected[step] for step in whole), fault
    checkpoint.save(folder, {"x": 1}, step=3)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], fault
    return max(whole)


@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize("body", ["beside", "both"])
@pytest.mark.parametrize("ranks", RANKS)
def test_kill_at_every_point_of_a_save_beside_the_training(
    tmp_path: Path, forker: Forker, ranks: int, body: str
) -> None:
    """`beside`: the helper dies, and all ranks are told. `both`: its rank dies in that moment, and it follows."""
    assert forker.run(tmp_path / "dry", ranks=ranks, fault="nowhere:sleep=0", body="beside") == [0] * ranks
    expected, _ = judge(str(tmp_path / "dry"))
    action = {"beside": "kill9", "both": "stop"}[body]
    outcomes, struck = [], set()
    sample = {"beside": 8, "both": 3}[body]
    for number, (point, rank, numbers) in enumerate(calls_of_helpers(ranks, sample)):
        for nth in numbers:
            fault = f"{point}:rank={rank}:nth={nth}:{action}"
            folder = tmp_path / f"{number}-{nth}"
            codes = forker.run(folder, ranks=ranks, fault=fault, body=body)
            if codes == [0] * ranks:  # it does not come to this
                assert acknowledged(folder) == {1, 2}
                break
            if body == "beside":
                assert codes == [74] * ranks, (fault, codes)
                said = [(tmp_path / f"{folder.name}.error-{rank}").read_text() for rank in range(ranks)]
                assert all("killed by SIGKILL" in text for text in said), said
            else:
                assert codes[rank] == -9 and not {0, 999} & set(codes), (fault, codes)
            outcomes.append(assert_old_or_new(folder, expected, fault))
            struck.add(point)
    assert set(outcomes) == {1, 2}
    assert len(struck) == (len(points_in("write/disk")) if FULL else sample)
    print(f"{len(outcomes)} kills, {outcomes.count(2)} of them after the commit")


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_of_a_rank_in_its_step(tmp_path: Path, forker: Forker, rank: int) -> None:
    """Before anything is copied, and when all is copied and nothing written: the old one stays."""
    assert forker.run(tmp_path / "dry", ranks=2, fault="nowhere:sleep=0", body="beside") == [0, 0]
    expected, _ = judge(str(tmp_path / "dry"))
    assert points_in("write/saver", "write/background") == {"checkpoint.begin", "checkpoint.staged"}
    for point in points_in("write/saver", "write/background"):
        fault = f"{point}:rank={rank}:kill9"
        codes = forker.run(tmp_path / point, ranks=2, fault=fault, body="beside")
        assert codes[rank] == -9 and not {0, 999} & set(codes), (fault, codes)
        assert assert_old_or_new(tmp_path / point, expected, fault) == 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not here")
@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)] if FULL else [(1, 0)])
def test_kill_at_every_system_call_of_a_helper(tmp_path: Path, forker: Forker, ranks: int, rank: int) -> None:
    assert forker.run(tmp_path / "dry", ranks=ranks, fault="9 0", body="beside_calls") == [0] * ranks
    expected, _ = judge(str(tmp_path / "dry"))
    newest = []
    for number in range(1, 1000, 1 if FULL else 5):
        folder = tmp_path / f"call-{number}"
        codes = forker.run(folder, ranks=ranks, fault=f"{rank} {number}", body="beside_calls")
        if codes == [0] * ranks:  # it has fewer calls
            break
        assert codes == [74] * ranks, (number, codes)
        newest.append(assert_old_or_new(folder, expected, f"call {number}"))
    print(f"{number - 1} system calls")
    assert newest == sorted(newest) and set(newest) == ({1, 2} if rank == 0 else {1})
    assert number > (40 if rank == 0 else 10)
