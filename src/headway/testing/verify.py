"""`verify_resume`: is a script's training the same when it is killed and goes on? Proved on the script itself.

The script runs once undisturbed, with a ledger of what each step saw and did. Then it is killed with SIGKILL at points
that tend to go wrong, started again with the same command, and the ledgers are compared: on as many ranks as before
every loss, sample and random number, and the last checkpoint, must be the same to the last bit; on another number of
ranks, the samples of every step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from headway.checkpoint.format import manifest
from headway.errors import HeadwayError, UsageError
from headway.launcher.agent.agent import check_nproc
from headway.record import ledger
from headway.record.ledger import Ledger, Row
from headway.run import Run
from headway.system import environment
from headway.system.environment import FAILPOINT
from headway.testing import faults

_TAIL = 2000  # characters of a script's output that are shown when it fails

POINTS = {
    "first-epoch": "in the middle of the first epoch",
    "boundary": "just after the first epoch",
    "last-epoch": "in the middle of the last epoch",
    "end": "after the last step",
}
"""where a run may be killed; in words"""


@final
@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a run is killed: right after its n-th step has been counted."""

    name: str
    """one of POINTS"""
    step: int
    every: str
    """how often the run saves meanwhile"""


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came out of one kill."""

    point: str
    killed_at: int
    resumed_from: int
    ranks: int
    ranks_after: int
    same: bool
    repeated: int
    """steps that were made twice"""
    words: str
    """what was compared and found; of a difference, the first step that differs, in both runs"""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts on one script."""

    script: str
    steps: int
    seconds: float
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(verdict.same for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def table(self) -> str:
        """For people: a line per kill, and below it what differs."""
        head = ("killed", "at step", "ranks", "went on from", "made twice", "verdict")
        lines = [head] + [
            (
                each.point,
                str(each.killed_at),
                str(each.ranks) if each.ranks == each.ranks_after else f"{each.ranks} -> {each.ranks_after}",
                f"step {each.resumed_from}",
                str(each.repeated),
                ("same" if each.same else "DIFFERS") + f": {each.words}",
            )
            for each in self.verdicts
        ]
        widths = [*(max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]), 0]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def verify_resume(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    nproc: int = 1,
    other_nproc: int | None = None,
    at: Sequence[str] = tuple(POINTS),
    keep: str | Path | None = None,
    timeout: float = 3600.0,
    tell: Callable[[str], object] = lambda _: None,
) -> Report:
    """Kills and resumes a script at four points, on `nproc` ranks and, if given, resumed on `other_nproc`.

    `at` chooses among the points: first-epoch, boundary, last-epoch, end. The script must use
    `pipe.enable_checkpointing(...)`; when and how it saves is set from outside. Runs are written to a temporary folder,
    or to `keep`. `timeout` is for one start of the script; `tell` gets a line before each.

    >>> report = hw.testing.verify_resume("train.py", ["--epochs", "2"], nproc=2, other_nproc=1)
    >>> assert report.ok, report.table()
    """
    if not Path(script).is_file():
        raise UsageError(f"there is no file {str(script)!r} in {Path.cwd()}")
    if unknown := [name for name in at if name not in POINTS]:
        raise UsageError(f"{unknown[0]!r} is no point to kill at: there are {', '.join(POINTS)}")
    for count in (nproc, nproc if other_nproc is None else other_nproc):
        check_nproc(count)
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-verify-")))
        trial = _Trial(script=str(script), args=list(args), folder=folder, timeout=timeout)
        tell(f"an undisturbed run on {_ranks(nproc)}")
        golden = trial.undisturbed(nproc)
        verdicts = []
        for after in [nproc] if other_nproc is None else [nproc, other_nproc]:
            for point in (each for each in points(golden) if each.name in at):
                tell(f"killed {POINTS[point.name]}, at step {point.step}, then on {_ranks(after)}")
                verdicts.append(trial.kill(golden, point, nproc, after))
        tell("started once more after its end")
        verdicts.append(trial.start_again(golden, nproc))
        return Report(
            script=str(script),
            steps=len(golden.last),
            seconds=round(time.monotonic() - began, 1),
            verdicts=verdicts,
        )


def points(golden: Ledger) -> Iterator[Point]:
    """Where to kill a run that, undisturbed, made these steps."""
    steps = list(golden.last.values())
    epochs: dict[tuple[str, int], list[int]] = {}
    for row in steps:
        epochs.setdefault((row.stage, row.epoch), []).append(row.step)
    first, *_, last = *epochs.values(), list(epochs.values())[-1]
    often = f"{max(1, len(first) // 4)} steps"
    yield Point(name="first-epoch", step=first[len(first) // 2], every=often)
    if len(epochs) > 1:
        yield Point(name="boundary", step=first[-1] + 1, every="1ep")
        yield Point(name="last-epoch", step=last[len(last) // 2], every=often)
    yield Point(name="end", step=steps[-1].step, every=often)


def compare(golden: Ledger, other: Ledger, *, same_ranks: bool) -> tuple[bool, str]:
    """Whether two ledgers tell the same, and what was compared, or the first step that differs."""
    mine, theirs = golden.last, other.last
    missing = sorted(mine.keys() - theirs.keys())
    extra = sorted(theirs.keys() - mine.keys())
    if missing or extra:
        which = f"step {missing[0]} was never made" if missing else f"step {extra[0]} is one too many"
        return False, f"{len(theirs)} steps instead of {len(mine)}; {which}"
    if not same_ranks and any(_unknown(row) for row in (*mine.values(), *theirs.values())):
        return False, "the loader does not know its samples: use hw.data.DataLoader or hw.data.ShardLoader"
    for step in mine:
        wrong = _differences(mine[step], theirs[step], same_ranks=same_ranks)
        if wrong:
            return (
                False,
                f"{', '.join(wrong)} since step {step}\n    {mine[step].words()}\n    {theirs[step].words()}",
            )
    losses = "losses, " if all(row.loss is not None for row in mine.values()) else "(no losses known) "
    return True, f"{losses}samples and random numbers of all steps" if same_ranks else "samples of all steps"


def last_checkpoint(run: Run) -> dict[str, str]:
    """A digest of each tensor in the run's last checkpoint: weights, averages, the state of optimisers."""
    path = manifest.step_dir(run.checkpoints_dir, manifest.steps(run.checkpoints_dir)[-1])
    with manifest.Folder(path) as folder:
        entries = manifest.read_index(folder, manifest.read_manifest(folder))
    return {
        name: " ".join(_part(path / chunk.file, chunk.begin, chunk.end) for chunk in entry.chunks)
        for name, entry in entries.items()
    }


def _part(path: Path, begin: int, end: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return ledger.digest(file.read(end - begin))


def _compare_ends(golden: Run, other: Run, words: str) -> tuple[bool, str]:
    """A loop of one's own tells no losses: what it has learnt must be the same as well."""
    mine, theirs = last_checkpoint(golden), last_checkpoint(other)
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        return False, f"{len(wrong)} of {len(mine)} tensors of the last checkpoint, the first one {wrong[0]}"
    return True, f"{words}, and the last checkpoint"


def _differences(one: Row, other: Row, *, same_ranks: bool) -> list[str]:
    names = ("loss", "samples", "random") if same_ranks else ("samples",)
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _unknown(row: Row) -> bool:
    return row.samples is None or row.samples.startswith("bytes:")


@final
@dataclass(kw_only=True)
class _Trial:
    """Starts of one script."""

    script: str
    args: list[str]
    folder: Path
    timeout: float
    _control: tuple[bool, str] | None = None
    _finished: Run | None = None

    def undisturbed(self, nproc: int) -> Ledger:
        run = self._new_run()
        self._start(run, nproc)
        if not run.ledger_file.exists():  # every pipeline writes one here
            raise UsageError(f"{self.script} ran no pipeline: call pipe.run() in it")
        found = ledger.load(run)
        if not any(run.checkpoints_dir.glob("step-*")):
            raise UsageError(
                f"{self.script} makes no checkpoints, so it cannot go on after a kill: call pipe.enable_checkpointing()"
            )
        if not found.rows:
            raise UsageError(f"{self.script} made no training step: nothing can be verified")
        self._finished = self._finished or run
        return found

    def kill(self, golden: Ledger, point: Point, nproc: int, after: int) -> Verdict:
        run, victim = self._new_run(), nproc - 1
        fault = faults.at("train.step", rank=victim, nth=point.step, action="kill9")
        self._start(run, nproc, fault=fault, every=point.every)
        self._start(run, after, every=point.every)
        began = int(run.info()["attempts"][-1]["step_started"])
        same, words = compare(golden, ledger.load(run), same_ranks=nproc == after)
        if same and nproc == after:
            assert self._finished is not None
            same, words = _compare_ends(self._finished, run, words)
        if not same and nproc == after and not self._repeatable(golden, nproc)[0]:
            words += (
                "\n    but two undisturbed runs differ, too: seed all random numbers with hw.seed(), and on GPUs set "
                "TrainValStage(deterministic=True)"
            )
        return Verdict(
            point=POINTS[point.name],
            killed_at=point.step,
            resumed_from=began,
            ranks=nproc,
            ranks_after=after,
            same=same,
            repeated=point.step - began,
            words=words,
        )

    def start_again(self, golden: Ledger, nproc: int) -> Verdict:
        """A run that is over: the same command does nothing."""
        assert self._finished is not None
        before = self._finished.ledger_file.read_bytes()
        self._start(self._finished, nproc)
        same = self._finished.ledger_file.read_bytes() == before
        last = max(golden.last)
        return Verdict(
            point="started again after the end",
            killed_at=last,
            resumed_from=last,
            ranks=nproc,
            ranks_after=nproc,
            same=same,
            repeated=0,
            words="nothing was done" if same else "steps were made after the end",
        )

    def _repeatable(self, golden: Ledger, nproc: int) -> tuple[bool, str]:
        if self._control is None:
            self._control = compare(golden, self.undisturbed(nproc), same_ranks=True)
        return self._control

    def _new_run(self) -> Run:
        return Run.create(self.folder, name="verify", world={})

    def _start(
        self, run: Run, nproc: int, *, fault: faults.Faults | None = None, every: str | None = None
    ) -> None:
        environ = {name: value for name, value in os.environ.items() if name != FAILPOINT}
        environ |= {environment.RUN: str(run.path), environment.LEDGER: "1"}
        # not in the background: whether a save is whole at the moment of the kill must not be a matter of luck
        environ |= {environment.SAVE_EVERY: every, environment.SAVE_IN_BACKGROUND: "0"} if every else {}
        environ |= fault.environ if fault else {}
        command = [sys.executable, "-m", "headway", "run", "--nproc", str(nproc), self.script, *self.args]
        try:
            done = subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.timeout,
            )
        except subprocess.TimeoutExpired:
            raise HeadwayError(
                f"{self.script} did not end within {self.timeout:g} s: give it less to do, or raise the timeout"
            ) from None
        if fault is not None and done.returncode == 0:
            raise HeadwayError(
                f"{self.script} was to be killed at {fault.text}, and ended well: it never came there"
            )
        if (fault is None) != (done.returncode == 0):
            raise HeadwayError(
                f"{self.script} ended with exit code {done.returncode}, so nothing can be said; its last words:\n"
                f"{done.stdout[-_TAIL:]}"
            )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
