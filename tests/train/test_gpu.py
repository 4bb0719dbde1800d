"""On a GPU: the host waits for the device at log points only, and the numbers equal a loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import FEATURES, Batches, make_net, make_pipe, sgd

from headway.train import TrainValStage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("alone"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Quiet(TrainValStage):
    """Waits for nothing itself; torch raises if anything else does."""

    watched = False

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        self.log("least", logits.min(), reduce="min")
        return F.cross_entropy(logits.float(), y)

    def train_step(self, batch: Any) -> Tensor:
        place = self.pipe.step % self.log_every
        if (
            self.watched and self.training and self.pipe.step >= self.log_every
        ):  # the first steps set things up
            torch.cuda.set_sync_debug_mode("error" if 0 < place < self.log_every - 1 else "default")
        return super().train_step(batch)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_between_log_points_the_host_does_not_wait(precision: str, tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path, ema=0.9)
    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in Batches(60)]
    pipe.register_dataset("train", pinned)
    stage = Quiet(precision=precision, gradient_clip=1.0, log_every=10)
    stage.watched = True
    pipe.append_stage(stage, max_epochs=1)
    try:
        pipe.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pipe.device.type == "cuda"
    assert len(pipe.history.points("train/loss")) == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_equal_to_a_loop_by_hand(precision: str, tmp_path: Path) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    net = make_net(dropout=0.0).cuda()
    optimizer, scaler = sgd(net.parameters()), torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    for x, y in Batches(100):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(net(x.cuda()).float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    pipe = make_pipe(tmp_path, net=make_net(dropout=0.0))
    pipe.register_dataset("train", Batches(100))
    pipe.append_stage(Quiet(precision=precision), max_epochs=1)
    pipe.run()
    for (name, ours), truth in zip(
        pipe.registered["net"].bare.state_dict().items(), net.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, truth), name


@pytest.mark.filterwarnings("ignore")  # the compiler warns of much
def test_compiled_models_keep_their_names_and_numbers(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path, net=make_net(dropout=0.0), compile=True)
    pipe.register_dataset("train", Batches(30))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Quiet(), max_epochs=1)
    pipe.run()
    assert list(pipe.registered["net"].bare.state_dict()) == list(make_net().state_dict())
    assert pipe.history["val/loss"][0] < pipe.history.points("train/loss")[0][1]  # type: ignore[operator]


def test_time_is_split_by_events(tmp_path: Path) -> None:
    """A GPU that is kept busy by large products spends its time in "compute", though the host is through at once."""

    class Busy(Quiet):
        def step(self, batch: Any) -> Tensor:
            big = torch.ones(8192, 8192, device=self.device)
            for _ in range(5):
                big = big @ big
            return super().step(batch)

    pipe = make_pipe(tmp_path, net=nn.Sequential(nn.Linear(FEATURES, 3)))
    pipe.register_dataset("train", Batches(20))
    pipe.append_stage(Busy(log_every=10), max_epochs=1)
    seconds: list[dict[str, float]] = []
    take = pipe.split.take
    pipe.split.take = lambda: (seconds.append(take()), seconds[-1])[1]  # type: ignore[method-assign]
    pipe.run()
    assert seconds[1]["compute"] > 0.8 * sum(seconds[1].values())
