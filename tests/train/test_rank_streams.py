"""Each rank draws its own random numbers in training, and the same ones again after a resume."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as td
import warm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader as TorchLoader, DistributedSampler, TensorDataset
from toys import FEATURES, sgd

import headway as hw
from headway.testing import ranks
from headway.train import Tp

STEPS, CUT = 6, 4


class Cut(Exception):
    """The run ends here, as if it had been killed."""


@pytest.fixture(autouse=True)
def default_scope() -> Iterator[None]:
    yield
    hw.seed(0)  # a process of `ranks` runs several tests


def everybodys(value: Any) -> list[Any]:
    values: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(values, value)
    return values


class Noise(nn.Module):
    """Keeps every mask that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(16) < 0.5
        if self.training:
            self.masks.append(tuple(mask.tolist()))
        return x * mask.float().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(FEATURES, 3), Noise()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.noise(self.linear(x))
        return logits


class Managed(hw.TrainValStage):
    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self.cut, self.resets = cut, list[Tensor]()

    def step(self, batch: Any) -> Tensor:
        if self.training and self.pipe.steps_done == self.cut:
            raise Cut
        loss: Tensor = nn.functional.cross_entropy(self.models["net"](batch[0]), batch[1])
        return loss

    def pre_epoch(self) -> None:
        self.resets.append(torch.rand(4))


class Own(hw.Stage):
    """A loop of the user's."""

    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self.cut, self.resets = cut, list[Tensor]()

    def run_epoch(self) -> None:
        for x, y in self.batches():
            if self.pipe.steps_done == self.cut:
                raise Cut
            self.pipe.optimizers["sgd"].zero_grad()
            nn.functional.cross_entropy(self.models["net"](x), y).backward()
            self.step_optimizer("sgd")

    def pre_epoch(self) -> None:
        self.resets.append(torch.rand(4))


def samples() -> TensorDataset:
    x = torch.arange(24.0 * FEATURES).reshape(24, FEATURES) % 7
    return TensorDataset(x, x[:, :3].argmax(1))


def ours() -> Any:
    return hw.data.DataLoader(samples(), global_batch_size=8, shuffle=True)


def torchs() -> Any:
    data, size = samples(), hw.world_size()
    sampler = DistributedSampler(data, num_replicas=size, rank=hw.rank())
    return TorchLoader(data, batch_size=8 // size, sampler=sampler)


def train(
    root: Path,
    stage: hw.Stage,
    *,
    loader: Callable[[], Any] = ours,
    seed: Callable[[], object] | None = None,
    net: Callable[[], Net] | None = None,
    registered: Callable[[nn.Module], dict[str, Any]] = lambda _: {},
) -> tuple[list[tuple[bool, ...]], list[Tensor]]:
    """Two epochs of three steps; returns the masks of all steps of this attempt, and what hooks drew."""
    if seed is not None:
        seed()
    pipe, model = hw.Pipeline(name="streams", root=root), (net or Net)()
    pipe.register_model("net", model, **registered(model))
    pipe.register_optimizer("sgd", sgd, model="net")
    pipe.register_dataset("train", loader())
    pipe.append_stage(stage, max_epochs=2)
    pipe.enable_checkpointing(every=2, background=False)
    with suppress(Cut):
        pipe.run()
    return model.noise.masks, stage.resets  # type: ignore[attr-defined]


def use_hw_seed() -> None:
    hw.seed(3)


def use_torch_seed() -> None:
    torch.manual_seed(3)


def check(
    root: Path, stage: Callable[..., Any], loader: Callable[[], Any], seed: Callable[[], object]
) -> None:
    size = hw.world_size()
    whole, resets = train(root / "whole", stage(), loader=loader, seed=seed)
    assert len(whole) == STEPS
    for step, masks in enumerate(zip(*everybodys(whole), strict=True)):
        assert len(set(masks)) == size, f"equal masks in step {step}"
    assert all(
        torch.equal(first, other) for first in resets for other in everybodys(first)
    )  # hooks draw the same
    cut, _ = train(root / "cut", stage(CUT), loader=loader, seed=seed)
    rest, _ = train(root / "cut", stage(), loader=loader, seed=lambda: torch.manual_seed(99))
    assert cut + rest == whole


@ranks(2)
@pytest.mark.parametrize("seed", [use_hw_seed, use_torch_seed])
@pytest.mark.parametrize("stage", [Managed, Own])
def test_masks_differ_between_ranks_and_are_the_same_after_a_resume(
    stage: Callable[..., Any], seed: Callable[[], object], tmp_path: Path
) -> None:
    check(tmp_path, stage, ours, seed)


@ranks(2)
def test_so_they_do_with_a_loader_of_torch(tmp_path: Path) -> None:
    check(tmp_path, Managed, torchs, use_torch_seed)


@ranks(4)
@pytest.mark.parametrize("stage", [Managed, Own])
def test_four_ranks_draw_four_streams(stage: Callable[..., Any], tmp_path: Path) -> None:
    check(tmp_path, stage, ours, use_hw_seed)


@ranks(2)
def test_rank_0_draws_what_one_process_draws() -> None:
    use_torch_seed()
    torch.rand(1)
    before = torch.get_rng_state()
    for _ in ours():
        break
    assert torch.equal(torch.get_rng_state(), before) is (hw.rank() == 0)


@ranks(2)
def test_shared_keeps_all_ranks_equal_throughout(tmp_path: Path) -> None:
    def seed() -> None:
        hw.seed(3, scope="shared")

    masks, _ = train(tmp_path, Managed(CUT), seed=seed)
    rest, _ = train(tmp_path, Managed())  # scope and state come from the checkpoint
    assert len(masks + rest) == STEPS
    assert everybodys(masks + rest) == [masks + rest] * 2
    seed()
    drawn = [(random.random(), float(np.random.random()), torch.rand(()).item()) for _ in ours()]
    assert everybodys(drawn) == [drawn] * 2


@ranks(2)
def test_a_loop_without_a_pipeline() -> None:
    """The streams separate with the first batch of a loader; a state that was restored before it stays."""
    use_hw_seed()
    weights, states, drawn = torch.rand(4), list[Any](), list[float]()
    assert all(torch.equal(weights, each) for each in everybodys(weights))
    for _ in ours():
        drawn.append(torch.rand(()).item())
        states.append(hw.train.random_state(torch.device("cpu")))
    assert all(len(set(numbers)) == 2 for numbers in zip(*everybodys(drawn), strict=True))
    torch.manual_seed(99)
    hw.train.restore_random_state(states[0], torch.device("cpu"))
    again = [torch.rand(()).item() for _ in zip(ours(), drawn[1:], strict=False)]
    assert again[: len(drawn) - 1] == drawn[1:]


@ranks(2)
def test_a_seed_in_a_hook_holds_and_is_separated_again(tmp_path: Path) -> None:
    class Seeds(Managed):
        def pre_epoch(self) -> None:
            torch.manual_seed(self.epoch)

    masks, _ = train(tmp_path, Seeds(), seed=use_hw_seed)
    assert all(len(set(each)) == 2 for each in zip(*everybodys(masks), strict=True))
    if hw.rank() == 0:
        torch.manual_seed(1)
        assert masks[3] == tuple((torch.rand(16) < 0.5).tolist())


@ranks(2)
def test_a_model_that_is_built_after_a_run_is_equal_on_all_ranks(tmp_path: Path) -> None:
    train(tmp_path, Managed(), seed=use_hw_seed)
    after = torch.rand(4)
    assert all(torch.equal(after, each) for each in everybodys(after))
    train(tmp_path, Managed(), seed=use_hw_seed)  # a finished run is restored, and ends as it did
    assert torch.equal(torch.rand(4), after)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)


@ranks(4, leaks=False)  # the groups of a mesh last as long as the process
def test_ranks_that_share_a_batch_share_a_stream(tmp_path: Path) -> None:
    """Two groups of two: tensor parallelism within a group, FSDP between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["data"].get_local_rank()

    def loader() -> Any:
        torchs_own = TensorDataset(*(each[place::2] for each in samples().tensors))
        return TorchLoader(torchs_own, batch_size=4)  # it does not tell its rank

    def split(_: nn.Module) -> dict[str, Any]:
        style = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
        return {"parallel": Tp(plan={"linear": style}, mesh=mesh)}

    masks, _ = train(tmp_path, Managed(), seed=use_hw_seed, loader=loader, registered=split, net=Wide)
    drawn = everybodys((masks, random.random(), float(np.random.random())))
    assert len(masks) == STEPS
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert all(len(set(each)) == 2 for each in zip(drawn[0][0], drawn[2][0], strict=True))


@ranks(2)
def test_a_loader_tells_the_rank_of_its_data() -> None:
    use_hw_seed()
    loader = hw.data.DataLoader(samples(), batch_size=8, rank=0, world_size=1)
    drawn = [(torch.rand(()).item(), random.random(), float(np.random.random())) for _ in loader]
    assert everybodys(drawn) == [drawn] * 2


SCRIPT = """
import json, sys
from pathlib import Path
import torch
import headway as hw

class Draw(hw.TrainValStage):
    def step(self, batch):
        with Path(f"drawn-{hw.world_size()}-{hw.rank()}").open("a") as file:
            print(torch.rand(()).item(), file=file)
        return self.models["net"](batch[0]).square().mean()

hw.init()
SEED
pipe = hw.Pipeline(name="elastic")
pipe.register_model("net", torch.nn.Linear(4, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(48, 4))
pipe.register_dataset("train", hw.data.DataLoader(data, global_batch_size=12, shuffle=True))
pipe.append_stage(Draw(), max_epochs=2)
pipe.enable_checkpointing(every=2, background=False)
pipe.run()
"""


@pytest.mark.parametrize(
    ("seed", "streams"),
    [("torch.manual_seed(3)", 3), ("hw.seed(3, scope='shared')", 1)],
    ids=["rank", "shared"],
)
def test_another_number_of_ranks_draws_other_numbers_and_says_so(
    seed: str, streams: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("SEED", seed))

    def run(nproc: int, **environ: str) -> Any:
        command = [sys.executable, "-m", "headway", "run", "--nproc", str(nproc), "train.py"]
        environment = os.environ | environ
        return warm.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    killed = run(2, HEADWAY_FAILPOINT="train.step:rank=1:nth=5:kill9")
    assert killed.returncode != 0
    done = run(3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved by 2 ranks, now 3" in done.stdout + done.stderr
    drawn = [[*(tmp_path / f"drawn-3-{rank}").read_text().split()] for rank in range(3)]
    assert [len(each) for each in drawn] == [4, 4, 4]
    assert all(len(set(numbers)) == streams for numbers in zip(*drawn, strict=True))
    before = (tmp_path / "drawn-2-0").read_text().split()
    assert not {*drawn[0]} & {*before}


STREAM = """
class Rows(torch.utils.data.IterableDataset):
    at = 0
    def __iter__(self):
        while self.at < 12:
            self.at += 1
            yield torch.ones(4)
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]
"""


def test_a_stream_that_begins_its_epoch_again_is_not_said_to_have_the_same_samples(tmp_path: Path) -> None:
    loader = "hw.data.DataLoader(data, global_batch_size=12, shuffle=True)"
    code = SCRIPT.replace("SEED", STREAM).replace(loader, "hw.data.DataLoader(Rows(), batch_size=2)")
    (tmp_path / "train.py").write_text(code)

    def run(nproc: int, **environ: str) -> str:
        command = [sys.executable, "-m", "headway", "run", "--nproc", str(nproc), "train.py"]
        done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | environ)
        return str(done.stdout + done.stderr)

    run(2, HEADWAY_FAILPOINT="train.step:rank=1:nth=4:kill9")
    text = run(1)
    assert "saved by 2 ranks, now 1: training draws other random numbers from here on" in text
    assert (
        "dataset 'train': its position was saved per rank, by 2 ranks, so it restarts its epoch: the samples"
        in text
    )


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, which each rank draws for itself."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


@ranks(2)
@pytest.mark.parametrize("scope", ["shared", "rank"])
def test_weights_that_ranks_change_differently_are_not_saved(scope: Any, tmp_path: Path) -> None:
    """The replicas of DDP would differ, and a checkpoint would have a part of each."""
    hw.seed(3, scope=scope)
    pipe = hw.Pipeline(name="noisy")
    pipe.register_model("net", nn.Linear(FEATURES, 3))
    pipe.register_optimizer("noisy", lambda parameters: Noisy(parameters, lr=0.05))
    pipe.register_dataset("train", ours())
    pipe.append_stage(Managed(), max_epochs=1)
    pipe.enable_checkpointing(tmp_path, every="2 steps", background=False)
    if scope == "shared":
        pipe.run()
        return
    with pytest.raises(
        hw.errors.UsageError, match=r"model 'net' differs between ranks after step 2,.*scope=\"shared\""
    ):
        pipe.run()
