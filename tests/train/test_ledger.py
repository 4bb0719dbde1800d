"""The ledger says what really happened, and can be read after a crash."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchLoader, TensorDataset

import headway as hw
from headway.cli import main
from headway.errors import UsageError
from headway.record import ledger
from headway.run import Run
from headway.system import jsonlines
from headway.watch.samples import samples_of

pytestmark = pytest.mark.usefixtures("alone")

DATA = TensorDataset(torch.arange(40.0)[:, None])


class Watched(hw.TrainValStage):
    """Notes the samples and the loss of each batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def train_step(self, batch: Any) -> Tensor:
        self.seen.append([int(number) for number in batch[0].flatten()])
        torch.rand(1)
        loss = self.models["net"](batch[0] / 40).square().mean()
        self.losses.append(loss.item())
        return loss

    def val_step(self, batch: Any) -> Tensor:
        return self.models["net"](batch[0] / 40).square().mean()  # type: ignore[no-any-return]


def fit(stage: hw.Stage, loader: Any, *, enable: bool = True, epochs: int = 2) -> Run:
    pipe = hw.Pipeline(name="fit")
    torch.manual_seed(0)
    pipe.register_model("net", nn.Linear(1, 1))
    pipe.register_optimizer("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pipe.register_dataset("train", loader)
    pipe.register_dataset("val", hw.data.DataLoader(DATA, batch_size=8))
    pipe.append_stage(stage, max_epochs=epochs)
    if enable:
        pipe.enable_ledger()
    return pipe.run()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_are_what_the_steps_saw(accumulate: int) -> None:
    stage = Watched(log_every=3, accumulate=accumulate)
    run = fit(stage, hw.data.DataLoader(DATA, batch_size=6, shuffle=True, seed=1))
    rows = ledger.read(run)
    batches = [stage.seen[:7][n : n + accumulate] for n in range(0, 7, accumulate)]
    batches += [stage.seen[7:][n : n + accumulate] for n in range(0, 7, accumulate)]
    assert [row.step for row in rows] == list(range(1, len(batches) + 1))
    assert [row.epoch for row in rows] == [0] * (len(batches) // 2) + [1] * (len(batches) // 2)
    for row, seen in zip(rows, batches, strict=True):
        assert samples_of(run, row.step).samples == [str(number) for batch in seen for number in batch]
    assert len({row.samples for row in rows}) == len({row.random for row in rows}) == len(rows)
    if accumulate == 1:
        assert [float.fromhex(row.loss or "") for row in rows] == stage.losses


def test_two_runs_alike_and_one_that_is_not() -> None:
    def rows(seed: int) -> list[tuple[str | None, str | None, str]]:
        torch.manual_seed(0)
        run = fit(Watched(), hw.data.DataLoader(DATA, batch_size=8, shuffle=True, seed=seed))
        return [(row.loss, row.samples, row.random) for row in ledger.read(run)]

    assert rows(1) == rows(1)
    assert [row[1] for row in rows(1)] != [row[1] for row in rows(2)]


def test_a_loader_that_does_not_know_its_samples() -> None:
    run = fit(Watched(), TorchLoader(DATA, batch_size=8))
    rows = ledger.read(run)
    assert all(row.samples is not None and row.samples.startswith("bytes:") for row in rows)
    assert len({row.samples for row in rows}) == 5, "five batches, in the same order in both epochs"
    with pytest.raises(UsageError, match="does not record its samples"):
        samples_of(run, 1)


class Own(hw.Stage):
    def run_epoch(self) -> None:
        for _ in self.batches("train"):
            pass


def test_a_loop_of_ones_own() -> None:
    run = fit(Own(), hw.data.DataLoader(DATA, batch_size=8, shuffle=True))
    rows = ledger.read(run)
    assert len(rows) == 10 and all(row.loss is None and row.batches for row in rows)
    assert "no loss" in rows[0].describe()


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit(Watched(), hw.data.DataLoader(DATA, batch_size=8), enable=False)
    assert not run.ledger_file.exists()
    with pytest.raises(UsageError, match="HEADWAY_LEDGER=1"):
        ledger.read(run)
    monkeypatch.setenv("HEADWAY_LEDGER", "1")
    assert len(ledger.read(fit(Watched(), hw.data.DataLoader(DATA, batch_size=8), enable=False))) == 10


def test_the_last_row_of_a_step_counts_and_half_a_line_does_not() -> None:
    run = fit(Watched(), hw.data.DataLoader(DATA, batch_size=8))
    line = json.loads(run.ledger_file.read_text().splitlines()[3]) | {"attempt": 2, "loss": "0x1p+0"}
    with run.ledger_file.open("a") as file:
        file.write('{"kind": "step", "step": 99, "lo\n' + json.dumps(line) + '\n{"kind": "st')
    found = ledger.load(run)
    assert found.repeated == 1 and len(found.last) == 10
    assert found.last[line["step"]].loss == "0x1p+0"
    assert [row.step for row in ledger.read(run)] == list(range(1, 11))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(Watched(), hw.data.DataLoader(DATA, batch_size=4, shuffle=True))
    capsys.readouterr()
    assert main(["runs", "samples", str(run.path), "--step", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["row"]["step"] == 3 and told["samples"] == samples_of(run, 3).samples
    assert main(["runs", "samples", str(run.path), "--step", "3"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("step 3 (epoch 0): loss ") and rest == told["samples"]
    assert main(["runs", "samples", run.id[-4:], "--step", "3", "--root", str(run.path.parent)]) == 0
    assert capsys.readouterr().out.startswith(first)
    assert main(["runs", "samples", str(run.path), "--step", "99"]) == 2
    assert "it has steps 1 to 20" in capsys.readouterr().err


def test_a_disk_that_is_full_costs_rows_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "ledger_file", property(lambda _: Path("/dev/full")))
    fit(Watched(), hw.data.DataLoader(DATA, batch_size=4))
    assert capfd.readouterr().err.count("rows of the ledger are being lost") == 1


def test_a_disk_that_is_full_for_a_moment_costs_the_rows_of_that_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later steps refer to the order, whose row was to be written then."""
    write, calls = jsonlines.AppendOnlyFile.append, itertools.count()

    def append(file: jsonlines.AppendOnlyFile, lines: bytes) -> tuple[int, str]:
        if file.path.name == "ledger.jsonl" and next(calls) == 0:
            return lines.count(b"\n"), "no space left"
        return write(file, lines)

    monkeypatch.setattr(jsonlines.AppendOnlyFile, "append", append)
    loader = hw.data.DataLoader(DATA, batch_size=4, shuffle=True)
    run = fit(stage := Watched(log_every=2), loader, epochs=1)
    assert [row.step for row in ledger.read(run)] == list(range(3, len(stage.seen) + 1))
    assert sorted(map(int, samples_of(run, 4).samples)) == sorted(stage.seen[3])
    file = run.ledger_file
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"order"' not in line))
    capsys.readouterr()
    assert main(["runs", "samples", str(run.path), "--step", "4"]) == 2
    assert "which step 4 used: its row was lost on a full disk" in capsys.readouterr().err


# --- a loop without a pipeline


def own_loop(stop_at: int | None = None) -> tuple[Run, list[list[int]], list[float]]:
    """Returns the run, and the samples and the losses of the steps of this attempt."""
    world = hw.init()
    train = hw.data.DataLoader(DATA, batch_size=6, shuffle=True, seed=1)
    torch.manual_seed(0)
    net, seen, losses = nn.Linear(1, 1), list[list[int]](), list[float]()
    run = hw.dist.open_run("runs", name="own", resume="auto")
    with hw.record.recording(run, world) as attempt, hw.train.Ledger(attempt) as book:
        saved = hw.checkpoint.load_latest(run)
        step = 0 if saved is None else saved.step
        if saved is not None:
            train.load_state_dict(saved.state["train"])
        while step < 9:
            for (x,) in train:
                loss = net(x / 40).square().mean()
                step += 1
                seen.append([int(number) for number in x.flatten()])
                losses.append(loss.item())
                book.add(step, loss, train, weight=len(x))
                if step % 4 == 0:
                    book.write()
                    hw.checkpoint.save(run, {"train": train.state_dict()}, step=step, lock=attempt.lock)
                if step == stop_at:
                    raise RuntimeError("stopped")
                if step == 9:
                    break
    return run, seen, losses


def test_a_loop_without_a_pipeline_has_a_ledger() -> None:
    run, seen, losses = own_loop()
    rows = ledger.read(run)
    assert [float.fromhex(row.loss or "") for row in rows] == losses and len(losses) == 9
    assert [samples_of(run, row.step).samples for row in rows] == [list(map(str, batch)) for batch in seen]


def test_a_loop_without_a_pipeline_resumes_its_run_and_its_ledger() -> None:
    whole, seen, losses = own_loop()
    with pytest.raises(RuntimeError, match="stopped"):
        own_loop(stop_at=6)
    cut, rest, again = own_loop()
    assert cut.id != whole.id and (rest, again) == (seen[4:], losses[4:])
    assert [each["step_started"] for each in cut.info()["attempts"]] == [0, 4]
    assert [row.attempt for row in ledger.read(cut)] == [1] * 4 + [2] * 5
    assert [(row.loss, row.samples) for row in ledger.read(cut)] == [
        (row.loss, row.samples) for row in ledger.read(whole)
    ]


def test_a_ledger_needs_a_loader_that_knows_its_samples() -> None:
    world = hw.init()
    with hw.record.recording(hw.dist.open_run(), world) as attempt, hw.train.Ledger(attempt) as book:
        loader = TorchLoader(DATA)
        with pytest.raises(UsageError, match=r"got a DataLoader, .* pass the hw\.data\.DataLoader"):
            book.add(1, torch.zeros(()), loader)


class Adversaries(hw.Stage):
    """A loop of one's own, which names the losses of its steps."""

    def __init__(self) -> None:
        super().__init__(log_every=3)
        self.losses: list[float] = []

    def run_epoch(self) -> None:
        for (x,) in self.batches():
            loss = self.models["net"](x / 40).square().mean()
            self.pipe.optimizers["sgd"].zero_grad()
            loss.backward()
            self.step_optimizer("sgd")
            self.log("first", loss, weight=len(x), ledger=True)
            self.log("second", 1.0, weight=float(len(x)), ledger=True)
            self.losses.append((loss.item() + 1.0) / 2)


def test_a_loop_of_ones_own_names_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Adversaries()
    run = fit(stage, hw.data.DataLoader(DATA, batch_size=8, shuffle=True))
    found = [float.fromhex(row.loss or "nan") for row in ledger.load(run).rows]
    assert len(found) == 10 and found == pytest.approx(stage.losses, rel=1e-6)


def test_only_a_loop_of_ones_own_names_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Named(Watched):
        def train_step(self, batch: Any) -> Tensor:
            loss = super().train_step(batch)
            self.log("own", loss, ledger=True)
            return loss

    with pytest.raises(UsageError, match="records the loss that step"):
        fit(Named(), hw.data.DataLoader(DATA, batch_size=8))

    class Early(Adversaries):
        def pre_epoch(self) -> None:
            self.log("early", 1.0, ledger=True)

    with pytest.raises(UsageError, match="for the steps of a loop of your own"):
        fit(Early(), hw.data.DataLoader(DATA, batch_size=8))
