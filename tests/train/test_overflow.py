"""fp16: a step that overflows is skipped by optimizer, scheduler and average alike, as in a loop by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from toys import Batches, make_net, warm_up

import headway as hw
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage
from headway.train.model.precision import HostReadback, MixedPrecision

BATCHES, DECAY = 12, 0.9
OVERFLOWS = (3, 4, 9)  # of the batches, counted from 0


def adam(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Overflowing(Batches):
    """Batches with a factor for the loss, which is too large for fp16 in some."""

    def __iter__(self) -> Any:
        for number, (x, y) in enumerate(super().__iter__()):
            yield x, y, torch.tensor(1e38 if number in OVERFLOWS else 1.0)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    x, y, factor = batch
    return F.cross_entropy(net(x).float(), y) * factor


class Half(TrainValStage):
    def pre_stage(self) -> None:
        self.rates: list[float] = []

    fails_at, looks = -1, False

    def step(self, batch: Any) -> Tensor:
        if self.steps_done == self.fails_at:
            raise KeyboardInterrupt  # right after the checkpoint of the step before
        if self.looks:
            self.pipe.state_dict()  # has all of the last step in it
        self.rates.append(self.optimizers()[0].param_groups[0]["lr"])
        return loss_of(self.models["net"], batch)


def by_hand(net: nn.Module, batches: Overflowing, *, accumulate: int, clip: float | None) -> dict[str, Any]:
    """The recipe of torch's documentation; a scale that has become smaller says that the step was skipped."""
    optimizer = adam(net.parameters())
    scheduler, scaler = warm_up(optimizer), torch.amp.GradScaler("cpu")
    model: Any = (
        nn.parallel.DistributedDataParallel(net) if hw.dist.is_initialized() and hw.world_size() > 1 else net
    )
    average = [p.detach().clone() for p in net.parameters()]
    every, rates, skipped, norms = list(batches), [], 0, []
    for start in range(0, len(every), accumulate):
        window = every[start : start + accumulate]
        optimizer.zero_grad()
        for batch in window:
            rates.append(optimizer.param_groups[0]["lr"])
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss / len(window) if accumulate > 1 else loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
            continue
        scheduler.step()
        for mean, p in zip(average, net.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - DECAY)
    return {
        "rates": rates,
        "skipped": skipped,
        "average": average,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scale": scaler.get_scale(),
        "norms": [norm for norm in norms if norm == norm and norm != float("inf")],
    }


def compare(
    folder: Path, *, accumulate: int, clip: float | None, rank: int, ahead: int = 0, looks: bool = False
) -> None:
    """`ahead` is the number of steps between log points, if the host does not wait for the device in between."""
    net = make_net(dropout=0.0)
    hand = by_hand(net, Overflowing(BATCHES, rank=rank), accumulate=accumulate, clip=clip)
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", make_net(dropout=0.0), ema=DECAY)
    pipe.register_optimizer("adam", adam, scheduler=warm_up)
    pipe.register_dataset("train", Overflowing(BATCHES, rank=rank))
    stage = Half(precision="fp16", accumulate=accumulate, gradient_clip=clip, log_every=ahead or 1)
    stage.looks = looks
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()

    registered, optimizer = pipe.registered_models["net"], pipe.optimizers["adam"]
    assert hand["skipped"] == 3, "the case has overflows"
    if stage.looks or not ahead:
        assert stage.rates == hand["rates"], "the scheduler stands still with the optimizer"
    assert pipe.schedulers["adam"].last_epoch == hand["scheduler"].last_epoch
    assert pipe.steps_done == BATCHES // accumulate, "a skipped step is a step"
    for ours, theirs in zip(registered.bare.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert registered.ema is not None
    for ours, mean in zip(registered.ema.state_dict().values(), hand["average"], strict=True):
        assert torch.equal(ours, mean)
    ours_steps, steps = (
        [state["step"].item() for state in each.state_dict()["state"].values()]
        for each in (optimizer, hand["optimizer"])
    )
    assert ours_steps == steps == [BATCHES // accumulate - hand["skipped"]] * len(steps)
    skipped, scales = pipe.history.points("train/skipped_steps"), pipe.history.points("train/loss_scale")
    assert sum(value for _, value in skipped) == hand["skipped"]  # type: ignore[misc]
    assert scales[-1][1] == hand["scale"] == stage._loop.precision.scaler.get_scale()  # type: ignore[union-attr]
    if not ahead:
        norms = [value for _, value in pipe.history.points("train/grad_norm")]
        assert norms == pytest.approx(hand["norms"], rel=1e-6)


CASES = [(1, None), (1, 0.5), (2, None), (2, 0.5)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("accumulate", "clip"), CASES)
def test_one_process_equals_a_loop_by_hand(accumulate: int, clip: float | None, tmp_path: Path) -> None:
    hw.init()
    compare(tmp_path, accumulate=accumulate, clip=clip, rank=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("log_every", "looks"), [(1, False), (5, False), (5, True)])
def test_a_host_that_runs_ahead_of_the_device_decides_later_and_alike(
    log_every: int, looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with fused optimizers on a GPU: whether a step overflowed is read before the next update, or a save."""
    hw.init()
    monkeypatch.setattr(MixedPrecision, "runs_ahead", lambda *_: True)
    reads: list[int] = []
    read = HostReadback.read
    monkeypatch.setattr(HostReadback, "read", lambda copy: (reads.append(1), read(copy))[1])
    compare(tmp_path, accumulate=1, clip=None, rank=0, ahead=log_every, looks=looks)
    assert len(reads) == BATCHES, "each step once"
    if looks:
        return

    def train(name: str, *, fails_at: int = -1) -> Pipeline:
        pipe = Pipeline(name=name, root=tmp_path)
        pipe.register_model("net", make_net(dropout=0.0), ema=DECAY)
        pipe.register_optimizer("adam", adam, scheduler=warm_up)
        pipe.register_dataset("train", Overflowing(BATCHES))
        stage = Half(precision="fp16", log_every=log_every)
        stage.fails_at = fails_at
        pipe.append_stage(stage, max_epochs=1)
        pipe.enable_checkpointing(every=1, background=False)
        if fails_at < 0:
            pipe.run()
        else:
            with pytest.raises(KeyboardInterrupt):
                pipe.run()
        return pipe

    whole = train("whole").state_dict()
    for at in (4, 5, 7):  # the checkpoints of a step that overflowed, of the next one, and of another
        train(f"at-{at}", fails_at=at)
        again = train(f"at-{at}").state_dict()
        assert again["schedulers"] == whole["schedulers"]
        for part in ("models", "averages"):
            for name, tensor in whole[part]["net"].items():
                assert torch.equal(again[part]["net"][name], tensor), (part, name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_stage_may_step_its_optimizer_itself(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step_optimizer` removes the scale; the scheduler and the average still follow once."""
    hw.init()
    monkeypatch.setattr(Half, "optimize", lambda stage: stage.step_optimizer("adam"), raising=False)
    compare(tmp_path, accumulate=1, clip=clip, rank=0)


@ranks(2)
def test_two_ranks_equal_ddp_by_hand(tmp_path: Path) -> None:
    compare(tmp_path, accumulate=1, clip=0.5, rank=hw.rank())


class Two(TrainValStage):
    """Two models; only the loss of the second overflows."""

    def optimizers(self) -> Sequence[Optimizer]:
        return list(self.pipe.optimizers.values())

    def step(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return F.cross_entropy(self.models["first"](x).float(), y) + loss_of(self.models["second"], batch)


@pytest.mark.usefixtures("alone")
def test_only_what_follows_the_optimizer_that_overflowed_stands_still(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    for name in ("first", "second"):
        pipe.register_model(name, make_net(dropout=0.0))
        pipe.register_optimizer(name, adam, scheduler=warm_up, model=name)
    pipe.register_dataset("train", Overflowing(BATCHES))
    pipe.append_stage(Two(precision="fp16"), max_epochs=1)
    pipe.run()
    made = {name: scheduler.last_epoch for name, scheduler in pipe.schedulers.items()}
    assert made == {"first": BATCHES, "second": BATCHES - len(OVERFLOWS)}
    assert pipe.history["train/skipped_steps"] == [len(OVERFLOWS)]


@pytest.mark.usefixtures("alone")
def test_learning_rates_are_recorded_by_optimizer_and_group(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    net = make_net()
    pipe.register_model("net", net)
    groups = [
        {"params": net.first.parameters(), "lr": 0.1},
        {"params": net.last.parameters(), "lr": torch.tensor(0.2)},
    ]
    pipe.register_optimizer("sgd", torch.optim.SGD(groups, lr=0.1), scheduler=warm_up)
    pipe.register_dataset("train", Batches(4))

    class Plain(TrainValStage):
        def step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.models["net"](batch[0]), batch[1])

    pipe.append_stage(Plain(log_every=1, on_nan="skip"), max_epochs=1)
    pipe.run()
    warm = [min(1.0, step / 50) for step in (1, 2, 3, 4)]  # as the step of that row used it
    for number, lr in enumerate((0.1, 0.2)):
        rates = [value for _, value in pipe.history.points(f"lr/sgd/{number}")]
        assert rates == pytest.approx([lr * each for each in warm])
    assert len(pipe.history.points("train/grad_norm")) == 4, "it is computed for on_nan, so it is logged"
