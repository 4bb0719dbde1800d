"""When training goes wrong: what is said about running out of memory, and about a loss that is not finite."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toys import BATCH, FEATURES, Batches, Classify, make_pipe

import headway as hw
from headway.errors import HeadwayError, UsageError
from headway.testing import ranks
from headway.train import Pipeline
from headway.train.checks import check_equal
from headway.train.uneven import gather_lengths


class Greedy(Classify):
    """Runs out of memory at step 4, in the phase it is told."""

    phase = "forward"

    def step(self, batch: Any) -> Tensor | None:
        loss = super().step(batch)
        if self.pipe.steps_done == 3 and self.phase == ("forward" if self.training else "validation"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more")
        if self.pipe.steps_done == 3 and self.phase == "backward" and loss is not None:
            loss.register_hook(self.fail)
        return loss

    def optimize(self) -> None:
        if self.pipe.steps_done == 3 and self.phase == "optimizer":
            self.fail()
        super().optimize()

    def fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "in the forward pass of step 4"),
        ("backward", "in the backward pass of step 4"),
        ("optimizer", "in the optimizer's step of step 4"),
        ("validation", "in the validation of step 4"),
    ],
)
def test_running_out_of_memory_is_told_with_what_is_known(phase: str, words: str, tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(3 if phase == "validation" else 8))
    pipe.register_dataset("val", Batches(2))
    stage = Greedy()
    stage.phase = phase
    pipe.append_stage(stage, max_epochs=1)

    def plan() -> None:
        answers = {"memory.needed": {"value": 61.0 * 2**30}, "device.memory": {"value": 80 * 2**30}}
        pipe.directory.plan_file.write_text(json.dumps({"answers": answers}))

    pipe.pre_run = plan  # type: ignore[method-assign]
    with pytest.raises(HeadwayError) as caught:
        pipe.run()
    said = str(caught.value)
    assert said.startswith(f"rank 0 ran out of memory on cpu {words}")
    assert f"shapes ({BATCH}, {FEATURES}) and ({BATCH},)" in said
    assert "the plan predicted 61.0 of 80.0 GiB" in said
    assert said.endswith("(CUDA out of memory. Tried to allocate 7 GiB)") and "\n" not in said
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


class Log(nn.Module):
    """Its output is not finite where its input is not positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def logarithmic() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Sequential(Log()), nn.Linear(8, 3))


def run_into_it(tmp_path: Path, loader: Any, net: nn.Module, **settings: Any) -> str:
    pipe = Pipeline(root=tmp_path)
    pipe.register_model("net", net)
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.0), model="net")
    pipe.register_dataset("train", loader)
    pipe.append_stage(Classify(log_every=4, **settings), max_epochs=1)
    with pytest.raises(HeadwayError) as caught:
        pipe.run()
    return str(caught.value)


@pytest.mark.usefixtures("alone")
def test_spoilt_weights_are_named(tmp_path: Path) -> None:
    """The weights stay as they are, as nothing is learnt; so the module is to blame that takes the logarithm of 0."""
    said = run_into_it(tmp_path, Batches(8), logarithmic(), on_nan="stop")
    assert "became non-finite at step 1, on rank 0" in said
    # the weights are spoilt by the first step: 0 x nan is nan
    assert "the weights '0.weight' of model 'net' are non-finite" in said


@pytest.mark.usefixtures("alone")
def test_a_module_is_named_when_the_weights_are_sound(tmp_path: Path) -> None:
    net = logarithmic()
    for parameter in net.parameters():
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    said = run_into_it(tmp_path, Batches(8), net)
    assert "the first module with a non-finite output is 2.0 of model 'net'" in said
    assert "whose input" not in said


@pytest.mark.usefixtures("alone")
def test_samples_are_named(tmp_path: Path) -> None:
    x = torch.rand(64, FEATURES)
    x[37] = float("nan")
    data = TensorDataset(x, torch.zeros(64, dtype=torch.long))
    loader = hw.data.DataLoader(data, batch_size=8, shuffle=False)
    net = nn.Linear(FEATURES, 3)
    for parameter in net.parameters():
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    said = run_into_it(tmp_path, loader, net)  # seen at step 8
    assert "became non-finite at step 5" in said
    assert "step 5 used the samples 32, 33, 34, 35, 36, 37, 38, 39" in said


@ranks(2)
@pytest.mark.parametrize(("size", "log_every", "named"), [(100, 3, True), (100, 4, False), (128, 4, True)])
def test_samples_are_named_unless_a_later_batch_was_short(
    size: int, log_every: int, named: bool, tmp_path: Path
) -> None:
    """Of four global batches of 32, the second one has the bad sample; the last one may be short."""
    x = torch.rand(size, FEATURES)
    x[37] = float("nan")
    data = TensorDataset(x, torch.zeros(size, dtype=torch.long))
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=16, shuffle=False))
    pipe.append_stage(Classify(log_every=log_every), max_epochs=1)
    with pytest.raises(HeadwayError) as caught:
        pipe.run()
    said = str(caught.value)
    assert "became non-finite at step 2, on rank 0;" in said
    assert ("step 2 used the samples 32, 33, 34, 35" in said) is named
    assert said.count("used the samples") == named


@ranks(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_look_for_it_together(parallel: str, tmp_path: Path) -> None:
    class Bad(Batches):
        def __iter__(self) -> Any:
            for number, (x, y) in enumerate(super().__iter__()):
                yield (x * float("nan") if number == 2 and hw.rank() == 1 else x), y

    pipe = make_pipe(tmp_path, parallel=parallel)
    pipe.register_dataset("train", Bad(8, rank=hw.rank()))
    pipe.append_stage(Classify(log_every=4), max_epochs=1)
    with pytest.raises(
        HeadwayError, match=r"became non-finite at step 3, on rank 1; the weights .* are non-finite"
    ):
        pipe.run()


class MeanOverNothing(Classify):
    """On rank 1, the third batch has nothing but padding."""

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        empty = hw.rank() == 1 and self.pipe.steps_done >= 2
        keep = torch.zeros(len(y)) if empty else torch.ones(len(y))
        losses = nn.functional.cross_entropy(self.models["net"](x), y, reduction="none")
        return (losses * keep).sum() / keep.sum()


@ranks(2)
def test_a_mean_over_nothing_is_named_with_its_rank_and_batch(tmp_path: Path) -> None:
    """The optimizer does not step, so that the weights show nothing; rank 0 reports what rank 1 has found."""
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(8))
    stage = MeanOverNothing(log_every=1)
    stage.optimize = lambda: None  # type: ignore[method-assign]
    pipe.append_stage(stage, max_epochs=1)
    with pytest.raises(HeadwayError) as caught:
        pipe.run()
    assert (
        "became non-finite at step 3, on rank 1; all modules have finite outputs for the last batch, of shapes "
        f"({BATCH}, {FEATURES}) and ({BATCH},), but its loss is non-finite, like a mean over nothing (0/0): return "
        "(loss, weight) from step(), with weight 0"
    ) in str(caught.value)


@ranks(2)
def test_numbers_of_batches_are_compared_exactly() -> None:
    """In single precision 2**24 and 2**24 + 1 are one number."""
    stage: Any = SimpleNamespace(name="long", device=torch.device("cpu"), train_dataset=lambda: None)
    lengths = gather_lengths(2**24 + hw.rank(), stage.device)
    assert lengths == [2**24, 2**24 + 1]
    with pytest.raises(UsageError, match="16,777,216 on rank 0, 16,777,217 on rank 1"):
        check_equal(stage, lengths)
