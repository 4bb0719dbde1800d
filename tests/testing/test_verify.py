"""verify-resume: says "same" where it is, and finds what a script forgets to keep."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import warm

from headway import checkpoint
from headway.cli import main
from headway.errors import HeadwayError, UsageError
from headway.record.ledger import LedgerContents, LedgerRow
from headway.run import Run
from headway.system import environment
from headway.testing import verify, verify_resume
from headway.testing.verify import (
    ResumeReport,
    Verdict,
    compare,
    compare_losses,
    find_difference,
    last_checkpoint,
    points,
)

SCRIPT = """
import torch
import headway as hw

calls = 0

class Fit(hw.TrainValStage):
    def step(self, batch):
        global calls
        calls += 1
        x = batch[0] + {noise}
        {forgets}
        return self.models["net"](x).square().mean()

hw.init(device="cpu")
hw.seed(0)
data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 32)[:, None])
pipe = hw.Pipeline(name="fit")
pipe.register_model("net", torch.nn.Linear(1, 1))
pipe.register_optimizer("adam", lambda parameters: torch.optim.Adam(parameters, lr=0.1))
pipe.register_dataset("train", hw.data.DataLoader(data, global_batch_size=4, shuffle=True, num_workers={workers}))
pipe.append_stage(Fit(log_every=3), max_epochs=2)
{keeps}
pipe.run()
"""


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a script that is started many times, and whose end is as any other's."""
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


def script(
    folder: Path,
    *,
    forgets: str = "",
    keeps: str = "pipe.enable_checkpointing()",
    workers: int = 0,
    noise: str = "torch.rand(1)",
) -> str:
    path = folder / "fit.py"
    path.write_text(SCRIPT.format(forgets=forgets, keeps=keeps, workers=workers, noise=noise))
    return str(path)


def row(step: int, **facts: object) -> LedgerRow:
    known = LedgerRow(
        step=step,
        attempt=1,
        stage="fit",
        epoch=(step - 1) // 10,
        world_size=2,
        loss=float(step).hex(),
        samples=f"s{step}",
        random=f"r{step}",
        batches=[],
    )
    return replace(known, **facts)  # type: ignore[arg-type]


def book(*rows: LedgerRow) -> LedgerContents:
    return LedgerContents(rows=list(rows), orders={})


GOLDEN = book(*(row(step) for step in range(1, 31)))


def test_where_to_kill() -> None:
    assert [(point.name, point.step, point.every) for point in points(GOLDEN)] == [
        ("first-epoch", 6, "2 steps"),
        ("boundary", 11, "1ep"),
        ("last-epoch", 26, "2 steps"),
        ("end", 30, "2 steps"),
    ]
    short = book(row(1))
    assert [(point.name, point.step, point.every) for point in points(short)] == [
        ("first-epoch", 1, "1 steps"),
        ("end", 1, "1 steps"),
    ]
    assert [point.name for point in verify._choose(short, None)] == ["first-epoch", "end"]
    with pytest.raises(
        UsageError, match=r"one epoch, so it cannot be killed at 'boundary'.*first-epoch or end"
    ):
        verify._choose(short, ["end", "boundary"])


def test_what_is_compared() -> None:
    again = book(*GOLDEN.rows, *(row(step, attempt=2) for step in range(8, 12)))
    assert compare(GOLDEN, again, same_ranks=True) == (
        True,
        "losses, samples and random numbers of all steps",
    )
    for facts in ({"loss": (12.0000001).hex()}, {"samples": "x"}, {"random": "x"}):
        other = book(*GOLDEN.rows, row(12, attempt=2, **facts))
        same, words = compare(GOLDEN, other, same_ranks=True)
        assert not same and words.startswith(f"{next(iter(facts))} from step 12 on\n"), (
            "the last row of a step counts"
        )
        assert compare(GOLDEN, other, same_ranks=False)[0] == ("samples" not in facts)
    assert compare(GOLDEN, book(*GOLDEN.rows[:-1]), same_ranks=True) == (
        False,
        "29 steps instead of 30; step 30 is missing",
    )
    assert not compare(GOLDEN, book(*GOLDEN.rows, row(31)), same_ranks=False)[0]
    foreign = book(*(row(step, samples=f"bytes:{step}") for step in range(1, 31)))
    assert compare(foreign, foreign, same_ranks=True)[0]
    assert "hw.data.DataLoader" in compare(foreign, foreign, same_ranks=False)[1]


def test_the_table() -> None:
    verdict = Verdict(
        point="after the last step",
        killed_at=30,
        resumed_from=28,
        ranks=2,
        ranks_after=1,
        same=False,
        repeated=2,
        words="samples from step 29 on\n    one\n    other",
    )
    report = ResumeReport(script="fit.py", steps=30, seconds=1.0, verdicts=[verdict])
    assert not report.ok and report.to_dict()["ok"] is False
    head, line, *rest = report.table().splitlines()
    assert (
        " ".join(line.split()) == "after the last step 30 2 -> 1 step 28 2 DIFFERS: samples from step 29 on"
    )
    assert head.index("verdict") == line.index("DIFFERS") and rest == ["    one", "    other"]
    short = replace(report, left_out=["boundary", "last-epoch"]).table().splitlines()
    assert short[-1] == (
        "not killed just after the first epoch and in the middle of the last epoch: the training has one epoch"
    )


def test_the_last_checkpoints_are_compared(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, name="fit", world={}) for _ in range(3)]
    for run, value in zip(runs, (1.0, 1.0, 2.0), strict=True):
        checkpoint.save(run, {"net": {"a": torch.ones(3), "b": torch.zeros(2)}}, step=1)
        checkpoint.save(run, {"net": {"a": torch.ones(3), "b": torch.full((2,), value)}}, step=2)
    golden, same, other = map(last_checkpoint, runs)
    assert golden == same and len(golden) == 2
    assert [name for name in golden if golden[name] != other[name]] == ["net.b"]


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_starts")
def test_a_script_that_keeps_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nproc", "1", "--other-nproc", "2", "--at", "first-epoch", "--json", "--keep", str(tmp_path)]
    assert main(["verify-resume", *options, script(tmp_path, workers=1)]) == 0
    printed = capsys.readouterr()
    started, _, after_it, _, verdict, *_ = printed.err.splitlines()
    assert started.endswith("up to 6 starts, each as long as an uninterrupted run")
    assert "; 5 starts left, none much longer: at most about " in after_it
    assert "same: losses, samples" in verdict, "as soon as it is known"
    report = json.loads(printed.out)
    assert report["ok"] and report["steps"] == 16
    same, other, end = report["verdicts"]
    assert (same["ranks_after"], same["killed_at"], same["resumed_from"], same["repeated"]) == (1, 5, 4, 1)
    assert same["words"] == "losses, samples and random numbers of all steps, and the last checkpoint"
    assert other["ranks_after"] == 2
    assert other["words"].startswith(
        "samples of all steps; not losses and weights, since training draws random"
    )
    assert end["words"] == "nothing was done"
    assert len(list(tmp_path.glob("verify-*"))) == 3, "kept"


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_starts")
def test_a_script_that_forgets_something(tmp_path: Path) -> None:
    report = verify_resume(script(tmp_path, forgets="x = x * (1 + calls)"), at=["first-epoch"])
    verdict = report.verdicts[0]
    assert not report.ok and not verdict.same
    assert verdict.words.startswith("loss from step 5 on\n"), "the first step after the checkpoint"
    assert "two uninterrupted runs differ" not in verdict.words


KEEPS = """
class Seen:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps, "queue": torch.full((3,), float(self.steps))}
    def load_state_dict(self, state):
        self.steps = state["steps"]
seen = Seen()
pipe.register_state("seen", seen)
pipe.enable_checkpointing()
"""
COUNTS = "seen.steps += self.training"


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("on_two_ranks", "words"),
    [
        ("", "samples of all steps; losses, weights and registered state within 0.01 of them"),
        ("x = x * (hw.world_size() * 0.1 + 0.9)", "loss from step 13 on: "),
        (
            "seen.steps -= hw.world_size() - 1",
            "registered.seen.queue of the last checkpoint, by more than 0.01 of it",
        ),
    ],
    ids=["same", "loss", "registered"],
)
def test_losses_weights_and_registered_state_on_another_number_of_ranks(
    on_two_ranks: str, words: str, tmp_path: Path
) -> None:
    path = script(tmp_path, forgets=f"{COUNTS}; {on_two_ranks}", keeps=KEEPS, noise="0")
    lines: list[str] = []
    report = verify_resume(path, other_nproc=2, quick=True, progress=lines.append)
    assert [verdict.point for verdict in report.verdicts[:2]] == ["in the middle of the last epoch"] * 2
    same, other, end = report.verdicts
    assert same.same and end.same
    assert other.words.startswith(words) and other.same is (not on_two_ranks)
    assert lines[0] == "up to 6 starts, each as long as an uninterrupted run"
    assert f"  {other.verdict}" in lines


def test_what_is_close() -> None:
    one = {"a": 1.0, "n": 3, "t": torch.tensor([100.0, 1.0]), "nan": math.nan}
    assert find_difference(one, dict(one), tolerance=0.0) is None
    for name, value in {"a": 1.02, "n": 4, "t": torch.tensor([100.0, 3.0]), "nan": 1.0}.items():
        assert find_difference(one, one | {name: value}, tolerance=0.01) == name
    assert find_difference(one, one | {"a": 1.001, "t": torch.tensor([100.0, 1.1])}, tolerance=0.01) is None
    assert find_difference(one, one | {"a": 1.001}, tolerance=0.0) == "a"
    assert find_difference(one, {**one, "more": 1}, tolerance=0.01) == "more"
    near = book(*(row(step, loss=(step * 1.001).hex()) for step in range(1, 31)))
    assert compare_losses(GOLDEN, near, 0.01) is None
    assert compare_losses(GOLDEN, near, 0.0001) == "loss from step 1 on: 1 and 1.001"


@pytest.mark.usefixtures("quick_starts")
def test_a_training_of_one_epoch_is_killed_at_two_points_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(script(tmp_path))
    path.write_text(path.read_text().replace("max_epochs=2", "max_epochs=1"))
    assert main(["verify-resume", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["left_out"] == ["boundary", "last-epoch"] and len(report["verdicts"]) == 3
    assert (
        "up to 10 starts, each as long as an uninterrupted run; --quick kills once: 4 starts\n" in printed.err
    )
    assert main(["verify-resume", "--at", "boundary", str(path)]) == 2
    assert "the training has one epoch, so it cannot be killed at 'boundary'" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_starts")
def test_a_script_that_ends_before_the_kill_is_named(tmp_path: Path) -> None:
    escapes = f"pipe.enable_checkpointing(); import os; os.environ.pop({environment.FAILPOINT!r}, None)"
    with pytest.raises(HeadwayError, match=r"fit\.py ended before step 5, at which it was to be killed"):
        verify_resume(script(tmp_path, keeps=escapes), at=["first-epoch"])


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("quick_starts")
def test_what_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        verify_resume(tmp_path / "absent.py")
    with pytest.raises(UsageError, match="first-epoch, boundary, last-epoch, end"):
        verify_resume(script(tmp_path), at=["middle"])
    with pytest.raises(UsageError, match="quick chooses the point"):
        verify_resume(script(tmp_path), at=["end"], quick=True)
    with pytest.raises(UsageError, match="saved no checkpoints"):
        verify_resume(script(tmp_path, keeps=""))
    with pytest.raises(HeadwayError, match=r"its last output(.|\n)*kaputt"):
        verify_resume(script(tmp_path, keeps="raise SystemExit('kaputt')"))
    (tmp_path / "plain.py").write_text("print('no pipeline here')\n")
    (tmp_path / "own.py").write_text(
        "import headway as hw\nworld = hw.init()\nrun = hw.dist.open_run('runs', name='own')\n"
        "with hw.record.recording(run, world): pass\n"
    )
    with pytest.raises(UsageError, match=r"own\.py did not run a pipeline: call pipe\.run\(\) in it"):
        verify_resume(tmp_path / "own.py")
    with pytest.raises(UsageError, match=r"plain\.py did not run a pipeline: call pipe\.run\(\) in it"):
        verify_resume(tmp_path / "plain.py")
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)\n")
    with pytest.raises(HeadwayError, match=r"slow\.py did not end within 0\.1 s: shorten it"):
        verify_resume(tmp_path / "slow.py", timeout=0.1)


@pytest.mark.usefixtures("quick_starts")
def test_a_script_that_does_not_end_after_the_kill_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that it has started keeps its output open, only when it is killed."""
    monkeypatch.setattr(verify, "_END_S", 1.0)
    pid = tmp_path / "pid"
    stays = (
        f"import os, subprocess; calls == 1 and {environment.FAILPOINT!r} in os.environ and open({str(pid)!r}, 'w')"
        ".write(str(subprocess.Popen(['sleep', '200'], start_new_session=True).pid))"
    )
    try:
        with pytest.raises(
            HeadwayError, match=r"fit\.py was to be killed at .*, and did not end within [0-9]+ s, though"
        ):
            verify_resume(script(tmp_path, forgets=stays), at=["first-epoch"])
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_two_runs_are_compared_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The oracle is the file: one bit of one loss is changed."""
    one, other = (Run.create(tmp_path, name=name) for name in ("one", "other"))
    rows = [asdict(row(step)) | {"kind": "step"} for step in (1, 2, 3)]

    def compared(*, as_json: bool = False) -> tuple[int, str]:
        code = main(["compare", str(one.path), str(other.path), "--exact", *(["--json"] if as_json else [])])
        told = capsys.readouterr()
        return code, told.out + told.err

    assert compared()[0] == 2 and "start the run with HEADWAY_LEDGER=1" in compared()[1]
    for run in (one, other):
        run.ledger_file.write_text("")
    assert compared()[1] == f"headway: {one.id} has made no training steps: nothing can be compared\n"
    for run in (one, other):
        run.ledger_file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert compared() == (0, "the same to the last bit: losses, samples and random numbers of all steps\n")
    assert json.loads(compared(as_json=True)[1])["same"] is True
    rows[1]["loss"] = (2.0 + 2**-51).hex()
    other.ledger_file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    code, told = compared()
    assert code == 1 and told.startswith(
        "they differ: loss from step 2 on\n    step 2 (epoch 0): loss 2 (0x1.0"
    )
    assert "hw.seed()" not in told
    rows[1] |= {"loss": asdict(row(2))["loss"], "random": "another"}
    other.ledger_file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert "random from step 2 on" in compared()[1] and "hw.seed()" not in compared()[1], (
        "the seed was the same"
    )
    rows[0] |= {"random": "another"}
    other.ledger_file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert "only random numbers differ, from the first step on: seed Python, numpy and torch" in compared()[1]


def test_what_a_ledger_says_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other run may be another user's, or one of a newer version with more in its rows."""
    one, other = (Run.create(tmp_path, name=name) for name in ("one", "other"))
    known = asdict(row(1)) | {"kind": "step"}
    one.ledger_file.write_text(json.dumps(known) + "\n")
    other.ledger_file.write_text(json.dumps(known | {"random": "\x1b]0;owned\x07"}) + "\n")
    compared = ["compare", str(one.path), str(other.path), "--exact"]
    assert main(compared) == 1
    told = capsys.readouterr().out
    assert "random from step 1 on\n    step 1" in told and "\x1b" not in told and "\\x1b]0;owned" in told
    for strange in ({}, known | {"newer": 1}, known | {"batches": 7}, {"kind": "order"}):
        other.ledger_file.write_text(json.dumps(strange) + "\n")
        assert main(compared) == 2
        told = capsys.readouterr().err
        assert str(other.ledger_file) in told and told.count("\n") == 1
