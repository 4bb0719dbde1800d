"""`verify_resume`: proves on a user's script that a run which is killed and resumed equals an uninterrupted one.

The script runs once uninterrupted, with a ledger of what each step saw and did. Then it is killed with SIGKILL where
resuming tends to go wrong, and started again with the same command. The ledgers are compared: on the same number of
ranks, every loss, sample and random number, and the last checkpoint, must be equal bit for bit; on another number of
ranks, the samples of every step, and within a tolerance the losses, trained weights and registered state.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, final

from headway.checkpoint.format.directory import CheckpointDirectory, list_steps, step_dir
from headway.checkpoint.format.manifest import read_index, read_manifest
from headway.errors import HeadwayError, UsageError, unknown_name
from headway.interpreter import module_command, module_environment
from headway.launcher.agent.agent import check_nproc
from headway.record import ledger
from headway.record.ledger import LedgerContents, LedgerRow
from headway.run import Run
from headway.system import environment
from headway.system.text import format_duration, plural
from headway.testing import faults

_LONGEST_TIMEOUT_S = 1e9
_SLOWER, _END_S = 2.0, 60.0
"""limit of a start that is killed: this multiple of an uninterrupted one, and these seconds to end"""
_QUICK = ("last-epoch", "first-epoch")
"""the point of a quick check: the first of these that the training has"""
_TOLERANCE = 0.01
"""how far losses and weights may be apart on another number of ranks, which sums in another order"""
_OUTPUT_CHARS = 2000  # of the end of a script's output, shown when it fails

POINTS = {
    "first-epoch": "in the middle of the first epoch",
    "boundary": "just after the first epoch",
    "last-epoch": "in the middle of the last epoch",
    "end": "after the last step",
}
"""where a run can be killed, and how reports describe it"""


@final
@dataclass(frozen=True, kw_only=True)
class KillPoint:
    """Where a run is killed: right after this step has been counted."""

    name: str
    """one of POINTS"""
    step: int
    every: str
    """how often the run saves"""


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one kill."""

    point: str
    killed_at: int
    resumed_from: int
    ranks: int
    ranks_after: int
    same: bool
    repeated: int
    """steps that were repeated"""
    words: str
    """what was compared; if it differs, the first step that differs in both runs"""

    @property
    def verdict(self) -> str:
        return ("same" if self.same else "DIFFERS") + f": {self.words}"


@final
@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """All verdicts on one script, as `verify_resume` returns them."""

    script: str
    steps: int
    seconds: float
    verdicts: list[Verdict] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """names of points that the training does not have, because it has one epoch"""

    @property
    def ok(self) -> bool:
        return all(verdict.same for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def table(self) -> str:
        """Formats the verdicts for people: a line per kill, and below it what differs."""
        head = ("killed", "at step", "ranks", "resumed from", "repeated", "verdict")
        lines = [head] + [
            (
                each.point,
                str(each.killed_at),
                str(each.ranks) if each.ranks == each.ranks_after else f"{each.ranks} -> {each.ranks_after}",
                f"step {each.resumed_from}",
                str(each.repeated),
                each.verdict,
            )
            for each in self.verdicts
        ]
        widths = [*(max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]), 0]
        left_out = " and ".join(POINTS[name] for name in self.left_out)
        notes = [f"not killed {left_out}: the training has one epoch"] if left_out else []
        table = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join([*table, *notes])


def verify_resume(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    nproc: int = 1,
    other_nproc: int | None = None,
    at: Sequence[str] | None = None,
    quick: bool = False,
    tolerance: float | None = None,
    keep: str | Path | None = None,
    timeout: float = 3600.0,
    progress: Callable[[str], object] = lambda _: None,
) -> ResumeReport:
    """Kills and resumes a script at up to four points, on `nproc` ranks and, if given, resumed on `other_nproc`.

    `at` chooses points: first-epoch, boundary, last-epoch, end; by default all that the training has. `quick` kills
    once only. On another number of ranks, losses, weights and registered state may differ by the fraction `tolerance`,
    by default 0.01. Without it they are not compared if training draws random numbers, since these are others there.
    The script uses `pipe.enable_checkpointing`, whose interval is set from outside, or saves in a loop of its own with
    a `hw.train.Ledger`. Runs are written to a temporary directory, or to `keep`. `timeout` is for one start; `progress`
    is called with a line before each, and with each verdict.

    >>> report = hw.testing.verify_resume("train.py", ["--epochs", "2"], nproc=2, other_nproc=1)
    >>> assert report.ok, report.table()
    """
    _check(script, nproc, other_nproc, at, timeout, quick=quick)
    start = time.monotonic()
    with ExitStack() as stack:
        directory = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-verify-")))
        trial = _Trial(
            script=str(script),
            args=list(args),
            directory=directory,
            timeout=timeout,
            tolerance=tolerance,
            progress=progress,
        )
        resumed_on = [nproc] if other_nproc is None else [nproc, other_nproc]
        kills = (len(at) if at else 1 if quick else len(POINTS)) * len(resumed_on)
        shorter = f"; --quick kills once: {2 + 2 * len(resumed_on)} starts" if kills > len(resumed_on) else ""
        progress(f"up to {2 + 2 * kills} starts, each as long as an uninterrupted run{shorter}")
        progress(f"an uninterrupted run on {plural(nproc, 'rank')}")
        golden = trial.run_uninterrupted(nproc)
        took_s = time.monotonic() - start
        chosen = _choose(golden, at, quick=quick)
        left = 2 * len(chosen) * len(resumed_on) + 1  # killed and resumed, and started again
        progress(
            f"it took {format_duration(took_s)}; {plural(left, 'start')} left, none much longer: at most about "
            f"{format_duration(left * took_s)}"
        )
        verdicts = [trial.kill(golden, point, nproc, after) for after, point in product(resumed_on, chosen)]
        verdicts.append(trial.start_again(golden, nproc))
        names = {each.name for each in chosen}
        return ResumeReport(
            script=str(script),
            steps=len(golden.last),
            seconds=round(time.monotonic() - start, 1),
            verdicts=verdicts,
            left_out=[name for name in POINTS if not at and not quick and name not in names],
        )


def _check(
    script: str | Path,
    nproc: int,
    other_nproc: int | None,
    at: Sequence[str] | None,
    timeout: float,
    *,
    quick: bool,
) -> None:
    """Raises `UsageError` for settings that cannot be verified."""
    if not Path(script).is_file():
        raise UsageError(f"there is no file {str(script)!r} in {Path.cwd()}")
    if unknown := [name for name in at or () if name not in POINTS]:
        raise unknown_name("point to kill at", unknown[0], POINTS)
    if at and quick:
        raise UsageError(f"quick chooses the point to kill at, and at={[*at]} names others: give one of them")
    check_nproc(nproc)
    if other_nproc is not None:
        check_nproc(other_nproc, "--other-nproc")
    if not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise UsageError(
            f"timeout is {timeout!r:.40}; expected seconds above 0 and at most {_LONGEST_TIMEOUT_S:g}"
        )


def points(golden: LedgerContents) -> Iterator[KillPoint]:
    """Yields the points at which to kill a run that has these steps when it is not interrupted."""
    steps = list(golden.last.values())
    epochs: dict[tuple[str, int], list[int]] = {}
    for row in steps:
        epochs.setdefault((row.stage, row.epoch), []).append(row.step)
    first, *_, last = *epochs.values(), list(epochs.values())[-1]
    often = f"{max(1, len(first) // 4)} steps"
    yield KillPoint(name="first-epoch", step=first[len(first) // 2], every=often)
    if len(epochs) > 1:
        yield KillPoint(name="boundary", step=first[-1] + 1, every="1ep")
        yield KillPoint(name="last-epoch", step=last[len(last) // 2], every=often)
    yield KillPoint(name="end", step=steps[-1].step, every=often)


def _choose(golden: LedgerContents, at: Sequence[str] | None, *, quick: bool = False) -> list[KillPoint]:
    """Returns the points to kill at: those that are named, by default all that the run has."""
    found = {point.name: point for point in points(golden)}
    if quick:
        return [next(found[name] for name in _QUICK if name in found)]
    if missing := [name for name in at or () if name not in found]:
        raise UsageError(
            f"the training has one epoch, so it cannot be killed at {missing[0]!r}: train two epochs, or choose "
            f"{' or '.join(found)}"
        )
    return [point for name, point in found.items() if at is None or name in at]


def compare(golden: LedgerContents, other: LedgerContents, *, same_ranks: bool) -> tuple[bool, str]:
    """Returns whether two ledgers are equal, and what was compared or the first step that differs."""
    mine, theirs = golden.last, other.last
    missing = sorted(mine.keys() - theirs.keys())
    extra = sorted(theirs.keys() - mine.keys())
    if missing or extra:
        which = f"step {missing[0]} is missing" if missing else f"step {extra[0]} is extra"
        return False, f"{len(theirs)} steps instead of {len(mine)}; {which}"
    if not same_ranks and any(_unknown(row) for row in (*mine.values(), *theirs.values())):
        return False, "the loader does not name its samples: use hw.data.DataLoader or hw.data.ShardLoader"
    for step in mine:
        wrong = _differences(mine[step], theirs[step], same_ranks=same_ranks)
        if wrong:
            lines = [
                f"{', '.join(wrong)} from step {step} on",
                *(contents[step].describe() for contents in (mine, theirs)),
            ]
            return False, "\n    ".join(lines)
    losses = "losses, " if all(row.loss is not None for row in mine.values()) else "(no losses logged) "
    return True, f"{losses}samples and random numbers of all steps" if same_ranks else "samples of all steps"


def compare_runs(one: Run, other: Run) -> tuple[bool, str]:
    """Compares two runs by their ledgers and last checkpoints; returns whether they are equal, and what was compared.

    Of runs on different numbers of ranks, only the samples are compared. If one run began with a checkpoint of the
    other, only the steps after it are.

    >>> compare_runs(Run.open("runs/digits-2026.11.15-14.30-x7k2"), Run.open("runs/digits-2026.11.15-15.02-m3p9"))
    (True, 'losses, samples and random numbers of all steps, and the last checkpoint')
    """
    mine, theirs = ledger.load(one), ledger.load(other)
    if not mine.rows or not theirs.rows:
        empty = other if mine.rows else one
        raise UsageError(f"{empty.id} has made no training steps: nothing can be compared")
    same_ranks = {row.world_size for row in mine.rows} == {row.world_size for row in theirs.rows}
    if begin := max(_begun_at(one, other), _begun_at(other, one)):
        mine, theirs = (
            replace(each, rows=[row for row in each.rows if row.step > begin]) for each in (mine, theirs)
        )
    same, words = compare(mine, theirs, same_ranks=same_ranks)
    if same and begin:
        words += f" after step {begin}"
    if not same and _differ_by_seed(mine, theirs):
        words += "\n    only random numbers differ, from the first step on: seed Python, numpy and torch with hw.seed()"
    if not same or not same_ranks or not all(list_steps(run.checkpoints_dir) for run in (one, other)):
        return same, words
    return _compare_ends(one, other, words)


def _begun_at(run: Run, parent: Run) -> int:
    """Returns the step of the checkpoint of `parent` that a run began with; 0 if it did not."""
    recorded = run.info().get("parent")
    if not isinstance(recorded, dict) or recorded.get("run") != parent.id:  # another user's may hold anything
        return 0
    step = recorded.get("step")
    return step if isinstance(step, int) else 0


def last_checkpoint(run: Run) -> dict[str, str]:
    """Returns a digest of each tensor in the run's last checkpoint: weights, averages, the state of optimizers."""
    path = step_dir(run.checkpoints_dir, list_steps(run.checkpoints_dir)[-1])
    with CheckpointDirectory(path) as directory:
        entries = read_index(directory, read_manifest(directory))
    return {
        name: " ".join(_part(path / chunk.file, chunk.begin, chunk.end) for chunk in entry.chunks)
        for name, entry in entries.items()
    }


def _part(path: Path, begin: int, end: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return ledger.digest(file.read(end - begin))


def _compare_ends(golden: Run, other: Run, words: str) -> tuple[bool, str]:
    """Compares the last checkpoints: a custom loop may log no losses, but its weights must be equal."""
    mine, theirs = last_checkpoint(golden), last_checkpoint(other)
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        return False, f"{len(wrong)} of {len(mine)} tensors of the last checkpoint, the first one {wrong[0]}"
    if (wrong_name := find_difference(_last_state(golden), _last_state(other), tolerance=0.0)) is not None:
        return False, f"{wrong_name} of the last checkpoint"
    return True, f"{words}, and the last checkpoint"


def _last_state(run: Run) -> dict[str, Any]:
    """Returns the trained weights, their averages and the registered state in the last checkpoint of a run, by name.

    Of a loop without a pipeline, these are all tensors.
    """
    from headway import checkpoint  # late: it imports torch

    state = checkpoint.load(step_dir(run.checkpoints_dir, list_steps(run.checkpoints_dir)[-1])).state
    if not {"models", "averages", "optimizers", "registered"} <= state.keys():
        return {name: leaf for name, leaf in _leaves("", state) if hasattr(leaf, "is_floating_point")}
    groups = [group for each in state["optimizers"].values() for group in each["groups"]]
    trained = {name for group in groups for name in group["params"]}  # not buffers, which may count per rank
    weights = _leaves("", {kind: state[kind] for kind in ("models", "averages")})
    return dict(_leaves("registered", state["registered"])) | {
        name: leaf for name, leaf in weights if name.partition(".")[2] in trained
    }


def _leaves(prefix: str, state: object) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, state


def find_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, tolerance: float) -> str | None:
    """Returns the name of the first value that differs by more than a fraction; whole numbers and texts must be equal.

    >>> find_difference({"a": 1.0, "b": 2}, {"a": 1.001, "b": 3}, tolerance=0.01)
    'b'
    """
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs or not _are_close(mine[name], theirs[name], tolerance):
            return name
    return None


def _are_close(mine: Any, theirs: Any, tolerance: float) -> bool:
    if hasattr(mine, "is_floating_point") and hasattr(theirs, "is_floating_point"):  # tensors
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        if not tolerance or not mine.is_floating_point():
            return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())
        largest = max(float(mine.double().norm()), float(theirs.double().norm()))
        return float((mine.double() - theirs.double()).norm()) <= tolerance * largest
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=tolerance) or (mine != mine and theirs != theirs)
    return bool(mine == theirs)


def compare_losses(golden: LedgerContents, other: LedgerContents, tolerance: float) -> str | None:
    """Returns the first step whose loss differs by more than a fraction, with both losses; None if none does."""
    losses = {
        step: (float.fromhex(row.loss), float.fromhex(found))
        for step, row in golden.last.items()
        if row.loss is not None and (found := other.last[step].loss) is not None
    }
    least = 1e-3 * max(
        (abs(mine) for mine, _ in losses.values()), default=0.0
    )  # a loss may be rounded to almost 0
    for step, (mine, theirs) in losses.items():
        if not abs(mine - theirs) <= tolerance * max(abs(mine), abs(theirs), least) and mine == mine:
            return f"loss from step {step} on: {mine:.6g} and {theirs:.6g}"
    return None


def _draws(golden: LedgerContents) -> bool:
    """Whether training draws random numbers, which are others on another number of ranks."""
    return len({row.random for row in golden.last.values()}) > 1


def _differences(one: LedgerRow, other: LedgerRow, *, same_ranks: bool) -> list[str]:
    names = ("loss", "samples", "random") if same_ranks else ("samples",)
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _differ_by_seed(one: LedgerContents, other: LedgerContents) -> bool:
    """Whether random numbers differ from the first step on, and nothing else does."""
    found = [
        _differences(row, other.last[step], same_ranks=True)
        for step, row in one.last.items()
        if step in other.last
    ]
    return found[:1] == [["random"]] and all(wrong in ([], ["random"]) for wrong in found)


def _unknown(row: LedgerRow) -> bool:
    return row.samples is None or row.samples.startswith("bytes:")


@final
@dataclass(kw_only=True)
class _Trial:
    """The starts of one script."""

    script: str
    args: list[str]
    directory: Path
    timeout: float
    tolerance: float | None
    progress: Callable[[str], object]
    _took_s: float | None = None
    """how long the first uninterrupted start took"""
    _control: tuple[bool, str] | None = None
    _finished: Run | None = None

    def run_uninterrupted(self, nproc: int) -> LedgerContents:
        run, began = self._new_run(), time.monotonic()
        self._start(run, nproc)
        self._took_s = self._took_s or time.monotonic() - began
        if not run.ledger_file.exists():  # every pipeline writes one here
            raise UsageError(
                f"{self.script} did not run a pipeline: call pipe.run() in it, or keep a hw.train.Ledger"
            )
        found = ledger.load(run)
        if not any(run.checkpoints_dir.glob("step-*")):
            raise UsageError(
                f"{self.script} saved no checkpoints, so it cannot be resumed: call pipe.enable_checkpointing()"
            )
        if not found.rows:
            raise UsageError(
                f"{self.script} made no training steps: nothing can be verified"
                "; verify one that trains with a Pipeline"
            )
        self._finished = self._finished or run
        return found

    def kill(self, golden: LedgerContents, point: KillPoint, nproc: int, after: int) -> Verdict:
        self.progress(f"killed {POINTS[point.name]}, at step {point.step}, then on {plural(after, 'rank')}")
        run = self._new_run()
        self._start(run, nproc, kill_at=point.step, every=point.every)
        self._start(run, after, every=point.every)
        began = int(run.info()["attempts"][-1]["step_started"])
        same, words = compare(golden, ledger.load(run), same_ranks=nproc == after)
        if same and nproc == after:
            assert self._finished is not None
            same, words = _compare_ends(self._finished, run, words)
        elif same:
            same, words = self._compare_closely(golden, run, words)
        if not same and nproc == after and not self._repeatable(golden, nproc)[0]:
            words += (
                "\n    but two uninterrupted runs differ, too: seed all random numbers with hw.seed(), and on GPUs set "
                "TrainValStage(deterministic=True)"
            )
        return self._report(
            Verdict(
                point=POINTS[point.name],
                killed_at=point.step,
                resumed_from=began,
                ranks=nproc,
                ranks_after=after,
                same=same,
                repeated=point.step - began,
                words=words,
            )
        )

    def _report(self, verdict: Verdict) -> Verdict:
        self.progress(f"  {verdict.verdict}")
        return verdict

    def _compare_closely(self, golden: LedgerContents, run: Run, words: str) -> tuple[bool, str]:
        """Compares a run that was resumed on another number of ranks: sums are rounded otherwise."""
        assert self._finished is not None
        if self.tolerance is None and _draws(golden):
            return True, (
                f"{words}; not losses and weights, since training draws random numbers, which are others on another "
                "number of ranks: --tolerance 0.1 compares them"
            )
        tolerance = _TOLERANCE if self.tolerance is None else self.tolerance
        wrong = compare_losses(golden, ledger.load(run), tolerance)
        if wrong is None:
            name = find_difference(_last_state(self._finished), _last_state(run), tolerance=tolerance)
            wrong = None if name is None else f"{name} of the last checkpoint"
        if wrong is not None:
            return False, (
                f"{wrong}, by more than {tolerance:.2g} of it: if that is due to batch normalization or to rounding, "
                "pass --tolerance"
            )
        return True, f"{words}; losses, weights and registered state within {tolerance:.2g} of them"

    def start_again(self, golden: LedgerContents, nproc: int) -> Verdict:
        """Starts a finished run again: the same command must do nothing."""
        assert self._finished is not None
        self.progress("started again after its end")
        before = self._finished.ledger_file.read_bytes()
        self._start(self._finished, nproc)
        same = self._finished.ledger_file.read_bytes() == before
        last = max(golden.last)
        return self._report(
            Verdict(
                point="started again after the end",
                killed_at=last,
                resumed_from=last,
                ranks=nproc,
                ranks_after=nproc,
                same=same,
                repeated=0,
                words="nothing was done" if same else "steps were made after the end",
            )
        )

    def _repeatable(self, golden: LedgerContents, nproc: int) -> tuple[bool, str]:
        if self._control is None:
            self._control = compare(golden, self.run_uninterrupted(nproc), same_ranks=True)
        return self._control

    def _new_run(self) -> Run:
        return Run.create(self.directory, name="verify", world={})

    def _start(self, run: Run, nproc: int, *, kill_at: int | None = None, every: str | None = None) -> None:
        environ = {
            name: value for name, value in module_environment().items() if name != environment.FAILPOINT
        }
        environ |= {environment.RUN: str(run.path), environment.LEDGER: "1"}
        # not in the background: whether a save is complete at the moment of the kill must not depend on timing
        environ |= {environment.SAVE_EVERY: every, environment.SAVE_IN_BACKGROUND: "0"} if every else {}
        if kill_at is not None:
            environ |= faults.at("train.step", rank=nproc - 1, nth=kill_at, action="kill9").environ
        command = module_command("headway", "run", "--nproc", str(nproc), self.script, *self.args)
        limit_s = self.timeout
        # it is killed before an uninterrupted start would end
        if kill_at is not None and self._took_s is not None:
            limit_s = min(limit_s, _SLOWER * self._took_s + _END_S)
        try:
            done = subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",  # output may not be UTF-8
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            if limit_s < self.timeout:
                raise HeadwayError(
                    f"{self.script} was to be killed at step {kill_at}, and did not end within {limit_s:.0f} "
                    f"s, though uninterrupted it took {self._took_s:.0f} s: look for threads and processes that "
                    "outlive a failure"
                ) from None
            raise HeadwayError(
                f"{self.script} did not end within {self.timeout:g} s: shorten it, or raise the timeout"
            ) from None
        if kill_at is not None and done.returncode == 0:
            raise HeadwayError(
                f"{self.script} ended before step {kill_at}, at which it was to be killed: let it train the same "
                "number of steps at every start"
            )
        if (kill_at is None) != (done.returncode == 0):
            raise HeadwayError(
                f"{self.script} ended with exit code {done.returncode}, so nothing can be verified; its last output:\n"
                f"{done.stdout[-_OUTPUT_CHARS:]}"
            )
