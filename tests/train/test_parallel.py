"""Sharded, compiled and checkpointed models give the same numbers under the same names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from toys import FEATURES, Batches, Classify, make_net, make_pipe, warm_up

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Ddp, Fsdp, Pipeline, Tp, count_parameters

STEPS = 20
MANY_STEPS = 200 if os.environ.get("HEADWAY_FAULTS") == "full" else 60


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.leave = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


def train(folder: Path, stage: dict[str, Any] | None = None, **model: Any) -> tuple[Pipeline, Classify]:
    pipe = make_pipe(folder, net=Tower(), **model)
    pipe.register_dataset("train", Batches(STEPS, rank=pipe.world.rank))
    pipe.register_dataset("val", Batches(3, rank=pipe.world.rank))
    classify = Classify(gradient_clip=0.5, **(stage or {}))
    pipe.append_stage(classify, max_epochs=1)
    pipe.run()
    return pipe, classify


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def assert_close(ours: Pipeline, truth: Pipeline, tolerance: float = 1e-6) -> None:
    mine, expected = (pipe.registered_models["net"].bare.state_dict() for pipe in (ours, truth))
    assert list(mine) == list(expected)  # no module., no _orig_mod., nothing of the kind
    for name, tensor in expected.items():
        torch.testing.assert_close(whole(mine[name]), whole(tensor), rtol=0, atol=tolerance)


@ranks(2)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_sharded_equals_replicated(accumulate: int, tmp_path: Path) -> None:
    settings = {"accumulate": accumulate}
    replicated, expected = train(tmp_path, settings, ema=0.9)
    sharded, found = train(tmp_path, settings, parallel=Fsdp(blocks=(Block,)), ema=0.9)
    weight = sharded.registered_models["net"].bare.enter.weight  # type: ignore[union-attr]
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (8, FEATURES)
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert sharded.history["val/loss"] == pytest.approx(replicated.history["val/loss"], abs=1e-6)
    assert sharded.history["train/grad_norm"] == pytest.approx(
        replicated.history["train/grad_norm"], rel=1e-5
    )
    assert_close(sharded, replicated)
    for name, average in replicated.state_dict()["averages"]["net"].items():
        mine = whole(sharded.state_dict()["averages"]["net"][name])
        torch.testing.assert_close(mine, average, rtol=0, atol=1e-6)


@ranks(2)
def test_averaged_weights_do_not_stay_in_gathered_layers(tmp_path: Path) -> None:
    settings = {"val_every": "10 steps"}
    replicated, expected = train(tmp_path, settings, ema=0.9)
    kept = Fsdp(blocks=(Block,), reshard_after_forward=False)
    sharded, found = train(tmp_path, settings, parallel=kept, ema=0.9)
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert_close(sharded, replicated)


@ranks(2)
def test_sharded_in_lower_precision_keeps_its_weights_in_full(tmp_path: Path) -> None:
    settings = Fsdp(blocks=(Block,), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pipe, stage = train(tmp_path, parallel=settings)
    assert next(pipe.registered_models["net"].bare.parameters()).dtype == torch.float32
    replicated, expected = train(tmp_path)
    assert stage.losses != expected.losses
    assert stage.losses == pytest.approx(expected.losses, abs=0.05)
    assert list(pipe.registered_models["net"].bare.state_dict()) == list(
        replicated.registered_models["net"].bare.state_dict()
    )


@ranks(2, leaks=False)  # the groups of a mesh last as long as the process
def test_a_mesh_of_ones_own(tmp_path: Path) -> None:
    """Hybrid: replicated along the first dimension (2 ranks), sharded along the second (1)."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    hybrid, _ = train(tmp_path, parallel=Fsdp(blocks=(Block,), mesh=mesh))
    replicated, _ = train(tmp_path)
    assert_close(hybrid, replicated)


@ranks(2)
def test_sharded_equals_replicated_over_many_steps(tmp_path: Path) -> None:
    """200 of them with HEADWAY_FAULTS=full."""

    def losses(**model: Any) -> list[float]:
        pipe = make_pipe(tmp_path, net=Tower(), **model)
        pipe.register_dataset("train", Batches(MANY_STEPS, rank=pipe.world.rank))
        stage = Classify()
        pipe.append_stage(stage, max_epochs=1)
        pipe.run()
        return stage.losses

    assert losses(parallel=Fsdp(blocks=(Block,))) == pytest.approx(losses(), abs=1e-6)


class Wide(nn.Module):
    """Two layers that a plan may split: the first by its outputs, the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def plan() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


@ranks(2, leaks=False)  # the groups of a mesh last as long as the process
@pytest.mark.parametrize("accumulate", [1, 3])
def test_layers_split_by_a_plan_equal_whole_ones(accumulate: int, tmp_path: Path) -> None:
    def run(**model: Any) -> tuple[Pipeline, Classify]:
        pipe = make_pipe(tmp_path, net=Wide(), ema=0.9, **model)
        pipe.register_dataset("train", Batches(60))  # the same on all ranks
        pipe.register_dataset("val", Batches(3))
        stage = Classify(gradient_clip=0.5, accumulate=accumulate)
        pipe.append_stage(stage, max_epochs=1)
        pipe.run()
        return pipe, stage

    split, found = run(parallel=Tp(plan=plan()))
    alone, expected = run(parallel="none")
    assert split.registered_models["net"].bare.up.weight.to_local().shape == (16, FEATURES)  # type: ignore[operator, union-attr]
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert split.history["val/loss"] == pytest.approx(alone.history["val/loss"], abs=1e-6)
    assert_close(split, alone)
    assert "split over ranks" in split.registered_models["net"].describe()


class Mixed(Wide):
    """Layers that are split, and others that every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(self.norm(x)))  # type: ignore[no-any-return]


def many_at_once(parameters: Any) -> torch.optim.AdamW:
    """As is usual on GPUs: one operation for all parameters."""
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


@ranks(2, leaks=False)
def test_a_plan_may_leave_layers_whole(tmp_path: Path) -> None:
    def run(**model: Any) -> tuple[Pipeline, Classify]:
        pipe = Pipeline(name="toy", root=tmp_path)
        pipe.register_model("net", Mixed(), ema=0.9, **model)
        pipe.register_optimizer("adamw", many_at_once, model="net", scheduler=warm_up)
        pipe.register_dataset("train", Batches(30))
        pipe.register_dataset("val", Batches(3))
        stage = Classify(gradient_clip=0.5)
        pipe.append_stage(stage, max_epochs=1)
        pipe.run()
        return pipe, stage

    split, found = run(parallel=Tp(plan=plan()))
    alone, expected = run(parallel="none")
    assert [len(group["params"]) for group in split.optimizers["adamw"].param_groups] == [4, 4]
    assert [len(group["params"]) for group in alone.optimizers["adamw"].param_groups] == [8]
    assert len({group["lr"] for group in split.optimizers["adamw"].param_groups}) == 1
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert split.history["val/loss"] == pytest.approx(alone.history["val/loss"], abs=1e-5)


@ranks(2, leaks=False)
def test_a_scheduler_made_too_early_for_a_plan_is_refused(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    pipe.register_model("net", Mixed(), parallel=Tp(plan=plan()))
    optimizer = many_at_once(pipe.registered_models["net"].bare.parameters())
    with pytest.raises(
        UsageError, match=r"'adamw' was made before .*: pass a function that makes the scheduler"
    ):
        pipe.register_optimizer("adamw", optimizer, scheduler=warm_up(optimizer))


@ranks(2, leaks=False)
# the output is a view of a DTensor; nobody writes into it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_mesh_of_two_dimensions_splits_and_shards(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    pipe = make_pipe(tmp_path, net=Wide(), parallel=Tp(plan=plan(), mesh=mesh))
    pipe.register_dataset("train", Batches(10))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()
    alone = make_pipe(tmp_path, net=Wide(), parallel="none")
    alone.register_dataset("train", Batches(10))
    alone.append_stage(Classify(), max_epochs=1)
    alone.run()
    assert_close(pipe, alone)


@ranks(2, leaks=False)
def test_a_plan_for_modules_that_are_not_there_is_refused(tmp_path: Path) -> None:
    pipe = Pipeline(root=tmp_path)
    with pytest.raises(
        UsageError,
        match="the plan splits 'upp', which is not a module of the model: its modules are up, down",
    ):
        pipe.register_model("net", Wide(), parallel=Tp(plan={"upp": ColwiseParallel()}))


class Heads(Mixed):
    """A norm of each head between the split layers, as in Qwen3, and a scale of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.scale = nn.RMSNorm(4), nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(self.norm(x)).unflatten(-1, (-1, 4))
        return self.head(self.down((self.q_norm(heads) * self.scale).flatten(-2)))  # type: ignore[no-any-return]


def run_plan(
    folder: Path, net: nn.Module, stage: Any = None, *, batches: Any = None, **model: Any
) -> Pipeline:
    pipe = make_pipe(folder, net=net, **model)
    pipe.register_dataset("train", Batches(6) if batches is None else batches)
    pipe.append_stage(stage or Classify(), max_epochs=1)
    pipe.run()
    return pipe


@ranks(2, leaks=False)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_whole_parameters_between_split_layers_get_all_of_their_gradient(tmp_path: Path) -> None:
    flat = None
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for settings in ({"accumulate": 1}, {"accumulate": 3}):
        alone = run_plan(tmp_path, Heads(), Classify(**settings), parallel="none")
        for mesh in (flat, both):
            split = run_plan(
                tmp_path,
                Heads(),
                Classify(**settings),
                parallel=Tp(plan=plan(), mesh=mesh, partial=("q_n*", "scale")),
            )
            assert_close(split, alone)
            weights = [whole(p).tolist() for p in split.registered_models["net"].bare.parameters()]
            assert hw.all_gather_object(weights) == [weights] * 2


class Late(Heads):
    """Layers that start with zeros send back no gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


class ByHand(hw.Stage):
    def run_epoch(self) -> None:
        for x, y in self.batches():
            nn.functional.cross_entropy(self.models["net"](x), y).backward()
            self.step_optimizer("sgd")
            self.pipe.optimizers["sgd"].zero_grad()


@ranks(2, leaks=False)
def test_what_a_plan_would_train_wrongly_is_refused_in_the_first_steps(tmp_path: Path) -> None:
    def mistake(net: nn.Module, *partial: str, stage: Any = None, batches: Any = None) -> str:
        parallel = Tp(plan=plan(), partial=partial)
        with pytest.raises(UsageError) as caught:
            run_plan(tmp_path, net, stage, batches=batches, parallel=parallel)
        return str(caught.value)

    part = r"the gradient of 'q_norm.weight', .* differs .* by \d+%: .* pass Tp\(partial=\('q_norm.weight',\)\), else"
    for net, stage in ((Heads(), Classify()), (Heads(), ByHand()), (Late(), Classify(gradient_clip=1.0))):
        assert re.search(part, mistake(net, "scale", stage=stage))
    assert "'norm.weight', whose gradient is whole on every rank already" in mistake(
        Heads(), "scale", "q_norm", "norm"
    )
    assert "'up.weight', which is not a parameter that the plan leaves whole" in mistake(Heads(), "up.weight")
    other = Batches(3, rank=hw.rank())
    assert "split over 2 ranks, which got different batches" in mistake(Wide(), batches=other)


class Tied(nn.Module):
    """Words in, words out, with one weight for both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.middle, self.out = (
            nn.Embedding(8, 6),
            nn.Sequential(nn.Linear(6, 6)),
            nn.Linear(6, 8, bias=False),
        )
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.words(x)).mean(1)))  # type: ignore[no-any-return]


@ranks(2, leaks=False)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_tied_parameters_stay_one_parameter(tmp_path: Path) -> None:
    words = [((b[0] * 9).long() % 8, b[1]) for b in Batches(6)]
    split = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    alone = run_plan(tmp_path, Tied(), batches=words, parallel="none")
    for parallel in (Tp(plan=split), Tp(plan=split, mesh=both), Fsdp()):
        pipe = run_plan(tmp_path, Tied(), batches=words, parallel=parallel)
        assert sum(len(group["params"]) for group in pipe.optimizers["sgd"].param_groups) == 3
        assert_close(pipe, alone)
    for parallel, message in (
        (Tp(plan={"out": split["out"]}), "'words.weight' and 'out.weight' are one parameter, but the plan"),
        (Fsdp(blocks=(nn.Embedding,)), "'words.weight' and 'out.weight' were one parameter, which sharding"),
    ):
        with pytest.raises(UsageError, match=message):
            run_plan(tmp_path, Tied(), batches=words, parallel=parallel)
    net = Tied()
    pipe = make_pipe(tmp_path, net=net, parallel=Tp(plan=split))
    net.out.weight = nn.Parameter(net.out.weight.detach().clone())
    pipe.register_dataset("train", words)
    pipe.append_stage(Classify(), max_epochs=1)
    with pytest.raises(UsageError, match="were one parameter"):
        pipe.run()


class Summing(Classify):
    def step(self, batch: Any) -> Tensor:
        self.log("seen", len(batch[1]), reduce="sum")
        return super().step(batch)


@ranks(2, leaks=False)
def test_ranks_that_share_batches_count_them_once(tmp_path: Path) -> None:
    points: list[Any] = []

    class Watch(hw.Callback):
        def log_point(self, *arguments: Any) -> None:
            points.append(arguments[-1])

    for parallel, ranks_with_data in ((Tp(plan=plan()), 1), ("ddp", 2)):
        pipe = make_pipe(tmp_path, net=Wide(), parallel=parallel)
        pipe.register_dataset("train", Batches(2))
        pipe.append_stage(Summing(log_every=2), max_epochs=1)
        pipe.add_callback(Watch())
        pipe.run()
        assert pipe.history["train/seen"] == [32.0 * ranks_with_data]
    assert [(point.data_ranks, point.values["train/seen"]) for point in points] == [(1, 32.0), (2, 64.0)]


@ranks(2)
def test_ddp_settings_reach_ddp(tmp_path: Path) -> None:
    static: Any = make_pipe(tmp_path, parallel=Ddp(static_graph=True, bucket_cap_mb=1)).models["net"]
    unused: Any = make_pipe(tmp_path, parallel=Ddp(find_unused_parameters=True)).models["net"]
    assert (static.static_graph, unused.static_graph) == (True, False)
    assert (static.find_unused_parameters, unused.find_unused_parameters) == (False, True)
    assert static.bucket_bytes_cap == 2**20 != unused.bucket_bytes_cap


@ranks(2)
def test_a_wrapper_of_the_users_own_stays_as_it_is(tmp_path: Path) -> None:
    """One that leaves each rank its own buffers: an evaluation uses rank 0's, and training goes on with its own."""

    class Evaluates(Classify):
        def post_epoch(self) -> None:
            if self.epoch == 1:
                self.found = self.pipe.validate(self, "val", weights="current")

    buffers = []
    for kind in (Classify, Evaluates):
        own: Any = DistributedDataParallel(make_net(dropout=0.0))
        own.broadcast_buffers = False
        pipe = make_pipe(tmp_path, net=own)
        assert pipe.models["net"] is own and pipe.registered_models["net"].evaluated is own.module
        pipe.register_dataset("train", Batches(3, rank=hw.rank()))
        pipe.register_dataset("val", Batches(2 + hw.rank()))
        stage = kind(val_every=None)
        pipe.append_stage(stage, max_epochs=2)
        pipe.run()
        buffers.append(own.module.norm.running_mean)
    assert torch.equal(*buffers)
    means = hw.all_gather_object(buffers[0].tolist())
    assert means[0] != means[1]


@ranks(2)
def test_a_sharded_model_validates_with_the_buffers_that_are_saved(tmp_path: Path) -> None:
    """Ranks have other statistics of their batches, and a checkpoint has rank 0's."""
    pipe = make_pipe(tmp_path, net=make_net(), parallel=Fsdp())
    pipe.register_dataset("train", Batches(3, rank=hw.rank()))
    pipe.register_dataset("val", Batches(2, rank=hw.rank()))
    stage = Classify()
    pipe.append_stage(stage, max_epochs=1)
    pipe.enable_checkpointing(tmp_path, background=False)
    pipe.run()
    means = hw.all_gather_object(pipe.registered_models["net"].bare.get_buffer("norm.running_mean").tolist())
    assert means[0] != means[1]
    found = pipe.validate(stage, weights="last")["val/loss"]
    assert pipe.history["val/loss"] == [found]


class Counts(Classify):
    """Writes into a buffer in validation."""

    def val_step(self, batch: Any) -> Tensor:
        self.pipe.registered_models["net"].bare.get_buffer("seen").add_(1)
        return super().val_step(batch)  # type: ignore[return-value]


def count_validated(directory: Path) -> float:
    net = make_net()
    net.register_buffer("seen", torch.zeros(()))
    pipe = make_pipe(directory, net=net, parallel=Fsdp())
    pipe.register_dataset("train", Batches(2, rank=hw.rank()))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Counts(), max_epochs=2)
    pipe.run()
    return net.get_buffer("seen").item()


@ranks(2)
def test_rank_0_keeps_what_a_validation_writes_into_buffers(tmp_path: Path) -> None:
    assert count_validated(tmp_path) == (0.0 if hw.rank() else 4.0)


@pytest.mark.usefixtures("alone")
def test_one_rank_keeps_what_a_validation_writes_into_buffers(tmp_path: Path) -> None:
    assert count_validated(tmp_path) == 4.0


class Unfreezes(Classify):
    """Trains all of the model from the second epoch on."""

    def pre_epoch(self) -> None:
        if self.epoch == 1:
            self.pipe.registered_models["net"].bare.requires_grad_(True)


@ranks(2)
def test_what_is_unfrozen_later_is_averaged_or_refused(tmp_path: Path) -> None:
    def unfreeze_later(net: Tower, pipe: Pipeline) -> Tensor:
        pipe.register_dataset("train", Batches(3, rank=pipe.world.rank))
        pipe.append_stage(Unfreezes(), max_epochs=2)
        pipe.run()
        return net.enter.weight.detach()

    begun, net = Tower().enter.weight.detach(), Tower()
    pipe = make_pipe(tmp_path, net=net, parallel=Ddp(find_unused_parameters=True))
    net.enter.requires_grad_(False)
    trained = unfreeze_later(net, pipe)
    assert not torch.equal(trained, begun)
    assert hw.all_gather_object(trained.tolist()) == [trained.tolist()] * 2

    net = Tower()
    net.enter.requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"'net': enter\.weight was frozen when .*find_unused_parameters=True"
    ):
        unfreeze_later(net, make_pipe(tmp_path, net=net))


@pytest.mark.usefixtures("alone")
def test_checkpointed_activations_are_computed_again(tmp_path: Path) -> None:
    plain, _ = train(tmp_path)
    checkpointed, _ = train(tmp_path, activation_checkpointing=(Block,))
    assert_close(checkpointed, plain, tolerance=0)
    calls = [pipe.registered_models["net"].bare.blocks[0].calls for pipe in (plain, checkpointed)]  # type: ignore[index, union-attr]
    assert calls == [STEPS + 3, 2 * STEPS + 3]  # in training twice, in validation once


@ranks(2, leaks=False)
def test_compiled_models_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return (
            graph.forward
        )  # no C++ compiler is asked for: the wrapping is tested here, not the code generator

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, mode: original(module, backend=backend, mode=mode))
    pipe, _ = train(tmp_path, compile=True)
    assert compiled
    monkeypatch.undo()
    plain, _ = train(tmp_path)
    assert_close(pipe, plain)


def test_parameters_are_counted_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    assert count_parameters(net) == 24
    assert count_parameters(net, trainable=True) == 20


@ranks(2)
def test_models_start_alike_on_all_ranks(tmp_path: Path) -> None:
    torch.manual_seed(hw.rank())
    pipe = Pipeline(root=tmp_path)
    pipe.register_model("net", nn.Linear(3, 3))
    weights = pipe.registered_models["net"].bare.weight.tolist()  # type: ignore[union-attr, operator]
    assert hw.all_gather_object(weights) == [weights] * 2


@ranks(2)
def test_sharded_models_are_validated_on_shards_of_different_length(tmp_path: Path) -> None:
    def validate(**model: Any) -> list[Any]:
        pipe = make_pipe(tmp_path, net=Tower(), **model)
        pipe.register_dataset("train", Batches(1, rank=hw.rank()))
        pipe.register_dataset("val", Batches(2 + 3 * hw.rank(), rank=hw.rank()))
        pipe.append_stage(Classify(), max_epochs=1)
        pipe.run()
        return [*pipe.history["val/loss"], *pipe.history["val/accuracy"]]

    assert validate(parallel="fsdp") == pytest.approx(validate(), abs=1e-6)


@ranks(2)
def test_a_rank_without_a_sample_takes_part_in_the_validation_of_a_sharded_model(tmp_path: Path) -> None:
    x, y = next(iter(Batches(1)))

    def loader(count: int) -> hw.data.DataLoader:
        return hw.data.DataLoader(TensorDataset(x[:1].repeat(count, 1), y[:1].repeat(count)), batch_size=4)

    pipe, stage = make_pipe(tmp_path, net=Tower(), parallel="fsdp"), Classify()
    pipe.register_dataset("train", Batches(1, rank=hw.rank()))
    pipe.register_dataset("val", loader(1))
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    both = pipe.validate(stage, loader(2), weights="current")
    assert pipe.history["val/loss"] == [pytest.approx(both["val/loss"], rel=1e-6)]
