"""kill -9 of any rank at any time, again and again: no checkpoint is lost, and in the end nothing shows.

5 kills on 3 ranks here; 300 on 4 ranks with `HEADWAY_FAULTS=full` (in parts, with another HEADWAY_FAULTS_SEED for each:
HEADWAY_FAULTS_KILLS=50). The runs that are killed have data workers, the one to compare with has none. Checkpoints are
judged by a checker that shares no code with headway; the ledger of the run that was killed is compared with that of one
that was not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checker import judge

from headway.record import ledger
from headway.record.ledger import LedgerContents
from headway.run import Run
from headway.testing.verify import compare

MILL = Path(__file__).with_name("mill.py")
HELPERS = Path(__file__).parents[1] / "helpers"
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
KILLS, RANKS = (int(os.environ.get("HEADWAY_FAULTS_KILLS", "300")), 4) if FULL else (5, 3)
EPOCHS = 24 if FULL else 10  # of 10 steps
EVERY = 7  # steps between saves, as in the mill


class Mill:
    """A process that forks ranks for one start after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        run: Run,
        *,
        ranks: int,
        kill: tuple[int, int, float] | None = None,
        fault: str = "",
        workers: int = 0,
    ) -> tuple[list[int], float]:
        """The exit codes of all ranks, and how long it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        trial = {"run": str(run.path), "ranks": ranks, "epochs": EPOCHS, "kill": kill, "fault": fault}
        trial["workers"] = workers
        self._process.stdin.write(json.dumps(trial) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert not answer["left"], "a data worker or a writer outlives its rank"
        return answer["codes"], answer["seconds"]


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    output = tmp_path_factory.mktemp("mill") / "stderr"
    with (
        output.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(MILL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELPERS)},
        ) as process,
    ):
        yield Mill(process)
        process.kill()


BEFORE = 4 if FULL else 2
"""how many ranks a run has before its number of ranks changes"""


@pytest.fixture(scope="module")
def undisturbed(mill: Mill, tmp_path_factory: pytest.TempPathFactory) -> LedgerContents:
    """What `BEFORE` ranks record that nobody kills."""
    run = new_run(tmp_path_factory.mktemp("undisturbed"))
    assert mill.run(run, ranks=BEFORE)[0] == [0] * BEFORE
    return ledger.load(run)


@dataclass
class Tally:
    kills: int = 0
    finished: int = 0
    invalid: int = 0
    lost: int = 0
    hung: int = 0
    most_repeated: int = 0
    victims: dict[int, int] = field(default_factory=dict)
    early: int = 0
    """kills before the first step of an attempt"""


def new_run(folder: Path) -> Run:
    return Run.create(folder, name="mill", world={})


def acknowledged(run: Run) -> set[int]:
    """The steps whose saves the run has called whole."""
    path = run.metrics_file(0)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return {row["step"] for row in rows if row["kind"] == "checkpoint"}


def furthest(run: Run) -> int:
    """The last step that is known to have been made."""
    return max((row.step for row in ledger.load(run).rows), default=0) if run.ledger_file.exists() else 0


def look(run: Run, tally: Tally) -> None:
    """After a kill: every checkpoint is whole, and those that were called so are there, or newer ones."""
    if not run.checkpoints_dir.is_dir():
        return
    whole, problems = judge(str(run.checkpoints_dir))
    tally.invalid += len(problems)
    assert not problems, problems
    told = acknowledged(run)
    if told:
        tally.lost += max(told) > max(whole, default=-1)
        assert max(told) <= max(whole, default=-1), (told, sorted(whole))
    # the interval, and the save in flight, for which the next one waits when its step is made
    bound = (furthest(run) - 1) // EVERY * EVERY - EVERY
    assert max(whole, default=0) >= bound, (sorted(whole), furthest(run))


def mill_until_done(mill: Mill, run: Run, tally: Tally, chance: random.Random) -> None:
    """Starts a run again and again, and kills it, until it has come to its end."""
    while True:
        before, tries = furthest(run), len(run.info()["attempts"])
        rank = chance.randrange(RANKS)
        # every fourth dies while it starts, resumes or makes its first steps; the others after a quarter of the steps
        furthest_kill = EPOCHS * 10 // 4
        rows, seconds = (
            (0, chance.uniform(0, 3)) if chance.random() < 0.25 else (chance.randint(1, furthest_kill), 0.1)
        )
        kill = (rank, rows, chance.uniform(0, seconds)) if tally.kills < KILLS else None
        codes, _ = mill.run(run, ranks=RANKS, kill=kill, workers=1)
        tally.hung += 999 in codes
        assert 999 not in codes, codes
        if codes == [0] * RANKS:
            tally.finished += 1
            return
        assert kill is not None and codes[rank] == -9, (codes, kill)
        tally.kills += 1
        tally.victims[rank] = tally.victims.get(rank, 0) + 1
        tally.early += furthest(run) == before
        look(run, tally)
        attempts = run.info()["attempts"]
        if len(attempts) > tries and "step_started" in attempts[-1]:  # else it was killed before it had begun
            tally.most_repeated = max(tally.most_repeated, before - attempts[-1]["step_started"])


@pytest.mark.timeout(6 * 3600 if FULL else 300)
def test_a_run_that_is_killed_at_random_ends_as_if_it_had_not_been(mill: Mill, tmp_path: Path) -> None:
    golden_run = new_run(tmp_path)
    assert mill.run(golden_run, ranks=RANKS)[0] == [0] * RANKS
    golden = ledger.load(golden_run)
    chance, tally = random.Random(int(os.environ.get("HEADWAY_FAULTS_SEED", "1"))), Tally()
    while tally.kills < KILLS:
        run = new_run(tmp_path)
        mill_until_done(mill, run, tally, chance)
        same, words = compare(golden, ledger.load(run), same_ranks=True)
        assert same, words
        shutil.rmtree(run.path)
    print(f"\n{tally}")
    assert tally.kills == KILLS and tally.finished >= 1
    assert tally.most_repeated <= 2 * EVERY
    assert tally.invalid == tally.lost == tally.hung == 0


@pytest.mark.parametrize("after", [1, 2, 3, 4] if FULL else [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    mill: Mill, undisturbed: LedgerContents, tmp_path: Path, after: int
) -> None:
    ranks, run, golden = BEFORE, new_run(tmp_path), undisturbed
    middle = EPOCHS * 10 // 2 - 5  # inside an epoch
    codes, _ = mill.run(run, ranks=ranks, fault=f"train.step:rank={ranks - 1}:nth={middle}:kill9", workers=1)
    assert codes[-1] == -9
    assert mill.run(run, ranks=after)[0] == [0] * after
    found = ledger.load(run)
    same, words = compare(golden, found, same_ranks=ranks == after)
    assert same, words
    assert {row.world_size for row in found.rows} == {ranks, after}
    assert _losses_agree(golden, found), "sums in another order, and other dropouts; but the same training"


def _losses_agree(golden: LedgerContents, found: LedgerContents) -> bool:
    ends = [
        [float.fromhex(row.loss or "nan") for row in list(each.last.values())[-20:]]
        for each in (golden, found)
    ]
    one, other = (sum(losses) / len(losses) for losses in ends)
    return abs(one - other) < 0.5 * max(one, other)
