"""A resumed run says which settings the script registers differently, and keeps the checkpoint's or applies them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from toys import Batches, Classify, make_net

import headway as hw

Scheduler = Callable[[Optimizer], lr_scheduler.LRScheduler]
SGD = partial(torch.optim.SGD, lr=0.1)


class Ends(Classify):
    """Ends like a process that was killed, before one of its steps; keeps the learning rates."""

    ends_before: int | None = None
    rates: list[float]

    def train_step(self, batch: Any) -> Any:
        if self.pipe.steps_done == self.ends_before:
            raise KeyboardInterrupt
        self.rates.append(self.pipe.optimizers["o"].param_groups[0]["lr"])
        return super().train_step(batch)


@pytest.fixture(autouse=True)
def in_directory(alone: None) -> None:
    pass


def train(
    root: Path,
    *,
    make: Callable[[Any], Optimizer] = SGD,
    scheduler: Scheduler | None = None,
    ends_before: int | None = None,
    max_epochs: int = 2,
    **settings: Any,
) -> tuple[hw.Pipeline, list[float]]:
    torch.manual_seed(0)
    pipe, stage = hw.Pipeline(name="toy", root=root), Ends(log_every=1, **settings)
    pipe.register_model("net", make_net())
    pipe.register_optimizer("o", make, scheduler=scheduler)
    stage.ends_before, stage.rates = ends_before, []
    for name in ("train", "val"):
        pipe.register_dataset(name, Batches(5))
    pipe.append_stage(stage, max_epochs=max_epochs)
    pipe.enable_checkpointing(every=1, background=False)
    if ends_before is None:
        pipe.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            pipe.run()
    return pipe, stage.rates


def changes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("headway: ") for line in lines if " instead of " in line]


def test_nothing_is_said_when_nothing_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ends_before in (4, 7, None):
        train(tmp_path, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, 10), ends_before=ends_before)
    assert changes(capsys) == []


def test_the_checkpoints_are_kept_until_they_are_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = [sys.executable, "train.py"]
    for name, words in (("orig_argv", begun), ("argv", begun[1:])):
        monkeypatch.setattr(sys, name, words)
    train(Path("runs"), ends_before=3)
    new = partial(torch.optim.SGD, lr=0.01)
    for name, words in (("orig_argv", [*begun, "--lr", "0.01"]), ("argv", ["train.py", "--lr", "0.01"])):
        monkeypatch.setattr(sys, name, words)
    for ends_before in (5, 6):  # as long as the script and the run differ
        pipe, rates = train(Path("runs"), make=new, ends_before=ends_before)
        assert set(rates) == {0.1}
        advice = f"headway resume {pipe.directory.id} -- --lr 0.01 applies it"
        assert changes(capsys) == [f"lr: 0.01 instead of 0.1; the checkpoint's is kept; {advice}"]
    monkeypatch.setenv("HEADWAY_APPLY", "1")
    _, rates = train(Path("runs"), make=new, ends_before=8)
    assert rates == [0.01, 0.01]
    assert changes(capsys) == ["lr: 0.01 instead of 0.1: in effect from here on"]
    monkeypatch.delenv("HEADWAY_APPLY")
    _, rates = train(Path("runs"), make=new)
    assert rates == [0.01, 0.01] and changes(capsys) == []


def groups(lr: float, decay: float) -> Any:
    def make(params: Any) -> Optimizer:
        first, *rest = params
        return torch.optim.AdamW(
            [{"params": [first], "lr": lr / 10}, {"params": rest}],
            lr=lr,
            betas=(0.8, 0.9),
            weight_decay=decay,
        )

    return make


def test_groups_and_several_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, make=groups(0.1, 0.0), ends_before=3)
    train(tmp_path, make=groups(0.2, 0.5), ends_before=4, gradient_clip=1.0)
    effect, kept = changes(capsys)
    assert effect == "gradient_clip: 1.0 instead of None: in effect from here on"
    assert kept.startswith(
        "lr: [0.02, 0.2] instead of [0.01, 0.1], weight_decay: 0.5 instead of 0.0; the checkpoint's are kept; "
    ) and kept.endswith(" applies them")
    monkeypatch.setenv("HEADWAY_APPLY", "1")
    pipe, rates = train(tmp_path, make=groups(0.2, 0.5))
    assert set(rates) == {0.02}
    assert [group["weight_decay"] for group in pipe.optimizers["o"].param_groups] == [0.5, 0.5]
    assert [group["betas"] for group in pipe.optimizers["o"].param_groups] == [(0.8, 0.9)] * 2


SCHEDULERS: dict[str, tuple[Scheduler, Scheduler]] = {
    "lambda": ((lambda o: hw.train.warmup_cosine(o, warmup=3, total=12)),) * 2,
    "cosine": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.001),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.002),
    ),
    "step": (lambda o: lr_scheduler.StepLR(o, 2), lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5)),
    "one-cycle": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=15),
    ),
    "sequential": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
        ),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 30)], [3]
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_as_if_it_had_begun_with_what_is_applied(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = SCHEDULERS[name]
    _, whole = train(tmp_path / "whole", make=partial(torch.optim.SGD, lr=0.3), scheduler=new)
    train(tmp_path, scheduler=old, ends_before=5)
    monkeypatch.setenv("HEADWAY_APPLY", "1")
    pipe, rates = train(tmp_path, make=partial(torch.optim.SGD, lr=0.3), scheduler=new)
    assert rates == pytest.approx(whole[5:], rel=1e-6)
    (line,) = changes(capsys)
    assert line.endswith(": in effect from here on") and "lr: " in line
    base = pipe.schedulers["o"]
    assert getattr(base, "base_lrs", None) in (None, [pipe.optimizers["o"].param_groups[0]["initial_lr"]])


def test_a_plateau_keeps_its_reductions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(lr: float, ends_before: int | None) -> list[float]:
        torch.manual_seed(0)
        made, stage = hw.Pipeline(name="toy", root=tmp_path), Ends(log_every=1)
        made.register_model("net", make_net())
        plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9)
        made.register_optimizer(
            "o", partial(torch.optim.SGD, lr=lr), scheduler=plateau, monitor="val/loss", every="epoch"
        )
        stage.ends_before, stage.rates = ends_before, []
        for name in ("train", "val"):
            made.register_dataset(name, Batches(2))
        made.append_stage(stage, max_epochs=4)
        made.enable_checkpointing(every=1, background=False)
        try:
            made.run()
        except KeyboardInterrupt:
            assert ends_before
        return stage.rates

    before = pipe(0.1, 5)
    assert before[-1] < 0.1
    monkeypatch.setenv("HEADWAY_APPLY", "1")
    assert pipe(0.2, None)[0] == pytest.approx(2 * before[-1])


def test_the_function_of_a_schedule_is_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, scheduler=lambda o: hw.train.warmup_cosine(o, warmup=3, total=12), ends_before=5)
    train(tmp_path, scheduler=lambda o: hw.train.warmup_cosine(o, warmup=3, total=20))
    (line,) = changes(capsys)
    assert line == "total: 20 instead of 12: in effect from here on"


def test_the_batch_size_is_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 10), torch.zeros(24, dtype=torch.long))
    for size, ends_before in ((2, 3), (4, None)):
        pipe, stage = hw.Pipeline(name="toy", root=tmp_path), Ends(log_every=1, val_every=None)
        pipe.register_model("net", make_net())
        pipe.register_optimizer("o", SGD)
        pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=size))
        stage.ends_before, stage.rates = ends_before, []
        pipe.append_stage(stage, max_epochs=1)
        pipe.enable_checkpointing(every=1, background=False)
        with nullcontext() if ends_before is None else pytest.raises(KeyboardInterrupt):
            pipe.run()
    assert changes(capsys) == ["batch_size: 4 instead of 2: in effect from here on"]
