"""On a GPU: the host waits for the device at log points only, and the numbers equal a loop by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from toys import FEATURES, Batches, make_net, make_pipe, sgd, warm_up

from headway.errors import HeadwayError
from headway.train import Fsdp, TrainValStage

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
        place = self.pipe.steps_done % self._loop.log_every
        if (
            self.watched and self.training and self.pipe.steps_done >= self._loop.log_every
        ):  # the first steps set things up
            torch.cuda.set_sync_debug_mode("error" if 0 < place < self._loop.log_every - 1 else "default")
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_in_fp16_a_fused_optimizer_with_a_scheduler_does_not_make_the_host_wait(tmp_path: Path) -> None:
    """And the numbers are those of a loop by hand, with overflows in it, that asks after each step."""
    overflows = (3, 4, 33)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    def flat(x: Tensor, number: int) -> Tensor:
        return x * (1e6 if number in overflows else 1.0)  # too large for fp16

    batches = [(flat(x, number), y) for number, (x, y) in enumerate(Batches(60))]
    net = make_net(dropout=0.0).cuda()
    optimizer, scaler = adam(net.parameters()), torch.amp.GradScaler("cuda")
    scheduler, average = warm_up(optimizer), [p.detach().clone() for p in net.parameters()]
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(net(x.cuda()).float().nan_to_num(1e30), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.lerp_(p.detach(), 1 - 0.9)

    class Tamed(Quiet):
        def step(self, batch: Any) -> Tensor:
            logits = self.models["net"](batch[0]).float()
            return F.cross_entropy(logits.nan_to_num(1e30), batch[1])

    pipe = make_pipe(tmp_path, net=make_net(dropout=0.0), optimizer=adam, scheduler=warm_up, ema=0.9)
    pipe.register_dataset("train", [(x.pin_memory(), y.pin_memory()) for x, y in batches])
    stage = Tamed(precision="fp16", log_every=10)
    stage.watched = True
    pipe.append_stage(stage, max_epochs=1)
    try:
        pipe.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scheduler.last_epoch < 60, "the case has overflows"
    assert pipe.schedulers["sgd"].last_epoch == scheduler.last_epoch
    registered = pipe.registered_models["net"]
    assert registered.ema is not None
    for ours, truth in zip(registered.bare.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, truth)
    for ours, truth in zip(registered.ema.state_dict().values(), average, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-7)


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
        pipe.registered_models["net"].bare.state_dict().items(), net.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, truth), name


@pytest.mark.filterwarnings("ignore")  # the compiler warns of much
def test_compiled_models_keep_their_names_and_numbers(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path, net=make_net(dropout=0.0), compile=True)
    pipe.register_dataset("train", Batches(30))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Quiet(), max_epochs=1)
    pipe.run()
    assert list(pipe.registered_models["net"].bare.state_dict()) == list(make_net().state_dict())
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
    take = pipe._state.timer.take
    pipe._state.timer.take = lambda most: (seconds.append(take(most)), seconds[-1])[1]  # type: ignore[method-assign]
    pipe.run()
    assert seconds[1]["compute"] > 0.8 * sum(seconds[1].values())


class Greedy(Quiet):
    def step(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == 2:
            torch.empty(1 << 40, dtype=torch.uint8, device=self.device)
        return super().step(batch)


def test_running_out_of_memory_is_told(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(5))
    pipe.append_stage(Greedy(), max_epochs=1)
    with pytest.raises(
        HeadwayError, match=r"rank 0 ran out of memory on cuda:0 in the forward pass of step 3"
    ) as caught:
        pipe.run()
    said = str(caught.value)
    assert "GiB were in use" in said and "Tried to allocate 1024.00 GiB" in said
    assert "PyTorch CUDA memory summary" in (pipe.directory.log_dir / "memory-00000.txt").read_text()


def test_states_in_host_memory(tmp_path: Path) -> None:
    def weights(parallel: Any) -> list[Tensor]:
        pipe = make_pipe(tmp_path, net=make_net(dropout=0.0, norm=False), parallel=parallel)
        pipe.register_dataset("train", Batches(20))
        pipe.append_stage(Quiet(), max_epochs=1)
        pipe.run()
        found = list(pipe.registered_models["net"].bare.parameters())
        if parallel != "none":
            assert all(p.device.type == "cpu" for p in found)
            assert all(
                s.device.type == "cpu"
                for s in tree_leaves(pipe.optimizers["sgd"].state)
                if isinstance(s, Tensor)
            )
        return [p.full_tensor().cpu() if isinstance(p, DTensor) else p.cpu() for p in found]

    for ours, truth in zip(weights(Fsdp(cpu_offload=True)), weights("none"), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


SYNCED = """
import os, sys
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]  # two ranks may share a GPU if they seem to be on two hosts
sys.path.insert(0, sys.argv[1])
import torch
import headway as hw
from toys import Batches, Classify, make_net, make_pipe

class Half(Batches):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x[hw.rank() :: 2], y[hw.rank() :: 2]

pipe = make_pipe(sys.argv[2], net=make_net(dropout=0.0), sync_batchnorm=True)
pipe.register_dataset("train", Half(20))
pipe.append_stage(Classify(), max_epochs=1)
pipe.run()
if hw.is_root():
    torch.save(pipe.registered_models["net"].bare.state_dict(), sys.argv[2] + "/weights")
"""


@pytest.mark.timeout(200)
def test_batch_norm_over_all_ranks(tmp_path: Path) -> None:
    """Two ranks with half of each batch have the statistics, and so the weights, of one with the whole."""
    (tmp_path / "synced.py").write_text(SYNCED)
    command = [sys.executable, "-m", "headway", "run", "--nproc", "2", str(tmp_path / "synced.py")]
    share = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    done = subprocess.run(
        [*command, str(Path(__file__).parent), str(tmp_path)],
        env=os.environ | share,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pipe = make_pipe(tmp_path, net=make_net(dropout=0.0))
    pipe.register_dataset("train", Batches(20))
    pipe.append_stage(Quiet(), max_epochs=1)
    pipe.run()
    found = torch.load(tmp_path / "weights", map_location="cuda", weights_only=True)
    for name, truth in pipe.registered_models["net"].bare.state_dict().items():
        torch.testing.assert_close(found[name], truth, rtol=1e-4, atol=1e-5)
