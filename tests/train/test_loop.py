"""What the loop promises beside the right numbers: order, modes, stopping, few frames, no waiting."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import FEATURES, Batches, Classify, make_net, make_pipe, sgd, warm_up

import headway as hw
from headway import dist
from headway.dist.failure.capture import HEARTBEAT
from headway.errors import HeadwayError
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage, TrainValStage, loop
from headway.train.metrics.meter import MetricAccumulator

alone = pytest.mark.usefixtures("alone")


class Diary(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def pre_run(self, pipe: Pipeline) -> None:
        self.lines.append(f"pre_run {pipe.name}")

    def post_run(self, pipe: Pipeline) -> None:
        self.lines.append(f"post_run {pipe.name}")

    def pre_stage(self, stage: Stage) -> None:
        self.lines.append(f"pre_stage {stage.name}")

    def post_stage(self, stage: Stage) -> None:
        self.lines.append(f"post_stage {stage.name}")

    def pre_epoch(self, stage: Stage) -> None:
        self.lines.append(f"pre_epoch {stage.epoch}")

    def post_epoch(self, stage: Stage) -> None:
        self.lines.append(f"post_epoch {stage.epoch} {len(stage.history.epochs)}")

    def log_point(self, stage: Stage, kind: str, point: Any) -> None:
        self.lines.append(f"{kind} {stage.pipe.steps_done} {sorted(point.values)}")


@alone
def test_stages_epochs_and_log_points_in_order(tmp_path: Path) -> None:
    pipe, diary, train = make_pipe(tmp_path), Diary(), Batches(3)
    pipe.register_dataset("train", train)
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Classify(log_every=2, val_every="2 epochs"), max_epochs=2, name="one")
    pipe.append_stage(Classify(val_every=None), max_steps=4, name="two")
    pipe.add_callback(diary)
    pipe.run()
    metrics = "['lr/sgd', 'train/accuracy', 'train/loss']"
    assert diary.lines == [
        "pre_run toy",
        "pre_stage one",
        "pre_epoch 0",
        f"train 2 {metrics}",
        f"train 3 {metrics}",
        "post_epoch 1 1",
        "pre_epoch 1",
        f"train 4 {metrics}",
        f"train 6 {metrics}",
        "validation 6 ['val/accuracy', 'val/loss']",
        "post_epoch 2 2",
        "post_stage one",
        "pre_stage two",
        "pre_epoch 0",
        f"train 9 {metrics}",
        "post_epoch 1 3",
        "pre_epoch 1",
        f"train 10 {metrics}",
        "post_epoch 2 4",
        "post_stage two",
        "post_run toy",
    ]
    assert train.epochs == [
        0,
        1,
        2,
        3,
    ]  # through all stages, so that the second does not see the first's order again
    assert [row.step for row in pipe.history.epochs] == [3, 6, 9, 10]
    assert len(pipe.history["train/loss"]) == 4
    assert len(pipe.history["val/loss"]) == 1
    assert [step for step, _ in pipe.history.points("train/loss")] == [2, 3, 4, 6, 9, 10]


@alone
@pytest.mark.parametrize("validates", [False, True])
def test_a_rank_without_batches_shows_that_its_epoch_has_ended(
    validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the hang report, until all ranks have met: one whose loader is longer waits for a step that never comes."""
    reduce, seen = MetricAccumulator.reduce, list[tuple[int, int | None]]()

    def observed(self: MetricAccumulator, **options: Any) -> Any:
        seen.append((pipe.steps_done, HEARTBEAT.ended_epoch))
        return reduce(self, **options)

    monkeypatch.setattr(MetricAccumulator, "reduce", observed)
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(3))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Classify(log_every=2, val_every="1 epoch" if validates else None), max_epochs=2)
    pipe.run()
    ended = [each for each in seen if each[1] is not None]
    assert ended == sorted([(3, 1), (6, 2)] * (2 if validates else 1))
    assert {(2, None), (3, None), (4, None), (6, None)} <= set(seen)


@alone
def test_user_code_runs_at_most_four_frames_below_run(tmp_path: Path) -> None:
    depths: dict[str, int] = {}

    class Deep(Classify):
        def step(self, batch: Any) -> Tensor:
            names = [frame.function for frame in inspect.stack()]
            depths["train" if self.training else "val"] = names.index("run")
            return super().step(batch)

    class Own(Stage):
        def run_epoch(self) -> None:
            depths["own"] = [frame.function for frame in inspect.stack()].index("run")

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(2))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(Deep(), max_epochs=1)
    pipe.append_stage(Own(), max_epochs=1)
    pipe.run()
    assert depths == {"train": 4, "val": 4, "own": 1}


def test_the_loop_fits_on_a_page() -> None:
    assert len(Path(loop.__file__).read_text().splitlines()) <= 150


@alone
def test_modes_are_set_and_what_the_user_froze_stays_frozen(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Frozen(Classify):
        def pre_stage(self) -> None:
            self.models["net"].norm.eval()  # type: ignore[operator, union-attr]

        def step(self, batch: Any) -> Tensor:
            net: Any = self.models["net"]
            seen.append((net.training, net.norm.training, torch.is_grad_enabled()))
            return super().step(batch)

    pipe = make_pipe(tmp_path)
    pipe.registered_models["net"].bare.eval()
    pipe.register_dataset("train", Batches(1))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Frozen(), max_epochs=2)
    pipe.run()
    assert seen == [(True, False, True), (False, False, False)] * 2


@alone
def test_validation_by_steps_and_limits(tmp_path: Path) -> None:
    pipe, diary = make_pipe(tmp_path), Diary()
    pipe.register_dataset("train", Batches(50))
    pipe.register_dataset("val", Batches(50))
    stage = Classify(val_every="4 steps", limit_train_batches=9, limit_val_batches=3)
    pipe.append_stage(stage, max_epochs=2)
    pipe.add_callback(diary)
    pipe.run()
    assert [line.split()[1] for line in diary.lines if line.startswith("validation")] == [
        "4",
        "8",
        "12",
        "16",
    ]
    assert pipe.steps_done == 18


@alone
def test_a_validation_due_at_the_last_step_is_made(tmp_path: Path) -> None:
    pipe, diary = make_pipe(tmp_path), Diary()
    pipe.register_dataset("train", Batches(50))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Classify(val_every="4 steps"), max_steps=8)
    pipe.add_callback(diary)
    pipe.run()
    assert [line.split()[1] for line in diary.lines if line.startswith("validation")] == ["4", "8"]


@alone
def test_precision_and_determinism_last_as_long_as_the_stage(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    class Look(Classify):
        def step(self, batch: Any) -> Tensor:
            seen.append((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))
            return super().step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Look(precision="tf32", deterministic=True), max_epochs=1, name="one")
    pipe.append_stage(Look(), max_epochs=1, name="two")
    pipe.run()
    assert seen == [("high", True), ("highest", False)]


@alone
def test_what_the_script_has_set_stays_set(tmp_path: Path) -> None:
    """Kernels that only warn, and torch's newer setting of precision, after which it refuses to tell of the older."""
    seen: list[tuple[bool, bool]] = []

    class Look(Classify):
        def train_step(self, batch: Any) -> Any:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            seen.append((torch.are_deterministic_algorithms_enabled(), warns))
            return super().train_step(batch)

        def post_epoch(self) -> None:
            self.pipe.validate(self, "val", weights="current")

    pipe = make_pipe(tmp_path)
    for name in ("train", "val"):
        pipe.register_dataset(name, Batches(1))
    pipe.append_stage(Look(deterministic=True), max_epochs=1, name="one")
    pipe.append_stage(Look(), max_epochs=2, name="two")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        pipe.run()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == [(True, False), (True, True), (True, True)]


class Merging(nn.Module):
    """A part that is trained is merged into the weight in eval mode, and taken out in training, as in loralib."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, FEATURES, generator=generator), requires_grad=False)
        self.low = nn.Parameter(torch.zeros(3, FEATURES))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged is mode:
            self.weight.data += -self.low.data if mode else self.low.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + self.low)


@alone
def test_a_module_that_changes_with_its_mode_is_told_of_it(tmp_path: Path) -> None:
    """As by hand, where weights are averaged, too: `eval()` and `train()` see the averages."""
    net, decay = Merging(), 0.5
    optimizer, expected = sgd([net.low]), []
    averages = {p: p.detach().clone() for p in net.parameters()}

    def swap() -> None:
        for weight, average in averages.items():
            weight.data, averages[weight] = average, weight.data

    for _ in range(2):
        for x, y in Batches(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            for weight, average in averages.items():
                average.lerp_(weight.detach(), 1 - decay)
        swap()
        net.eval()
        with torch.no_grad():
            expected.append(F.cross_entropy(net(x), y).item())
        net.train()
        swap()
    ours = Merging()
    pipe = make_pipe(tmp_path, net=ours, ema=decay)
    pipe.register_dataset("train", Batches(3))
    pipe.register_dataset("val", [(x, y)])
    pipe.append_stage(Classify(), max_epochs=2)
    pipe.run()
    assert pipe.history["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert torch.equal(ours.low, net.low) and torch.equal(ours.weight, net.weight)


@alone
def test_a_frozen_model_keeps_the_mode_that_it_was_registered_in(tmp_path: Path) -> None:
    modes: list[tuple[bool, bool]] = []

    class Distill(Classify):
        def step(self, batch: Any) -> Tensor:
            modes.append((self.models["teacher"].training, self.models["net"].training))
            return super().step(batch)

    pipe = make_pipe(tmp_path, net=make_net().eval())  # as `from_pretrained` returns them
    pipe.register_model("teacher", make_net().requires_grad_(False).eval())
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Distill(), max_epochs=1)
    pipe.run()
    assert modes == [(False, True)]


@alone
@pytest.mark.parametrize("held", [False, True])
def test_a_backbone_that_is_unfrozen_later_is_trained_in_training_mode(held: bool, tmp_path: Path) -> None:
    """By a hook, with an optimizer that has its parameters from the beginning, or gets them then."""
    modes: list[tuple[bool, bool]] = []

    class Unfreezes(Classify):
        def pre_epoch(self) -> None:
            backbone: Any = self.models["backbone"]
            if self.epoch == 1:
                backbone.requires_grad_(True)
                if held:
                    backbone.norm.eval()
                else:
                    self.pipe.optimizers["sgd"].add_param_group({"params": list(backbone.parameters())})

        def step(self, batch: Any) -> Tensor:
            backbone: Any = self.models["backbone"]
            modes.append((backbone.training, backbone.norm.training))
            return super().step(batch) + backbone(batch[0]).square().mean()

    pipe = make_pipe(tmp_path)
    backbone = pipe.register_model("backbone", make_net().requires_grad_(False).eval())
    if held:
        pipe.optimizers["sgd"].add_param_group({"params": list(backbone.parameters())})
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Unfreezes(), max_epochs=3)
    pipe.run()
    assert modes == ([(True, True), *[(True, False)] * 2] if held else [(False, False), *[(True, True)] * 2])


@alone
def test_only_half_precision_has_a_loss_scale_and_it_is_kept(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(20))
    stages = {name: Classify(precision=name) for name in ("bf16", "fp16")}
    for name, stage in stages.items():
        pipe.append_stage(stage, max_epochs=1, name=name)
    pipe.run()
    state = pipe.state_dict()["stages"]
    assert state["bf16"]["precision"] == {}
    assert state["fp16"]["precision"]["_growth_tracker"] > 0
    assert stages["fp16"].losses[-1] < stages["bf16"].losses[0]


class Average(Classify):
    """Looks at the weights that validation uses."""

    def val_step(self, batch: Any) -> None:
        net: Any = self.models["net"]
        self.log("weight", net.first.weight.double().sum(), weight=len(batch))


@alone
def test_validation_uses_the_average_and_training_goes_on_without(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path, ema=0.5)
    pipe.register_dataset("train", Batches(5))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Average(), max_epochs=1)
    pipe.run()
    model = pipe.registered_models["net"]
    assert model.ema is not None
    average = model.ema.state_dict()["first.weight"]
    assert pipe.history["val/weight"] == [average.double().sum().item()]
    assert not torch.equal(average, dict(model.bare.named_parameters())["first.weight"])


class Pair(TrainValStage):
    """Two models in a row, with an optimizer for both."""

    def step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.models["head"](self.models["body"](batch[0])), batch[1])


class PairByHand(Stage):
    """The same in a loop of one's own."""

    def run_epoch(self) -> None:
        for x, y in self.batches("train"):
            F.cross_entropy(self.models["head"](self.models["body"](x)), y).backward()
            self.step_optimizer("sgd")
            self.pipe.optimizers["sgd"].zero_grad()


@alone
@pytest.mark.parametrize("make", [Pair, lambda: Pair(gradient_clip=1.0), PairByHand])
def test_one_optimizer_moves_the_averages_of_all_its_models(make: Any, tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    torch.manual_seed(0)
    for name, out in (("body", FEATURES), ("head", 3), ("unused", 3)):
        pipe.register_model(name, nn.Linear(FEATURES, out), ema=0.5)
    both = [*pipe.models["body"].parameters(), *pipe.models["head"].parameters()]
    pipe.register_optimizer("sgd", sgd(both))
    pipe.register_dataset("train", Batches(2))
    expected = {name: model.bare.weight.detach().clone() for name, model in pipe.registered_models.items()}  # type: ignore[union-attr, operator]

    def average(*_: Any) -> None:
        for name, mean in expected.items():
            mean.lerp_(pipe.models[name].weight.detach(), 0.5)  # type: ignore[union-attr, operator, arg-type]

    pipe.optimizers["sgd"].register_step_post_hook(average)
    pipe.append_stage(make(), max_epochs=1)
    pipe.run()
    found = pipe.state_dict()["averages"]
    for name, mean in expected.items():
        assert torch.equal(found[name]["weight"], mean), name


@ranks(2)
def test_any_rank_may_stop_and_all_stop_at_the_same_step(tmp_path: Path) -> None:
    class Impatient(Classify):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 12 and hw.rank() == 1:
                self.stop_stage()
            return super().step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(100, rank=hw.rank()))
    pipe.append_stage(Impatient(log_every=10), max_epochs=5)
    pipe.run()
    assert hw.all_gather_object(pipe.steps_done) == [20, 20]


@ranks(2)
def test_a_stop_after_an_epoch_is_heard_before_the_next(tmp_path: Path) -> None:
    class Impatient(Classify):
        def post_epoch(self) -> None:
            if self.epoch == 2 and hw.rank() == 1:
                self.stop_stage()

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(5, rank=hw.rank()))
    pipe.append_stage(Impatient(), max_epochs=5)
    pipe.run()
    assert hw.all_gather_object(pipe.steps_done) == [10, 10]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=ranks(2)), pytest.param(3, marks=ranks(3))])
def test_validation_of_1003_samples_is_the_same_on_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    """Through the whole pipeline; ranks have different numbers of batches, and batch norm brings buffers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1003, FEATURES, generator=generator)
    y = x[:, :3].argmax(1)
    net = make_net()
    with torch.no_grad():
        logits = net.eval()(x)
    loss, correct = F.cross_entropy(logits, y).item(), int((logits.argmax(1) == y).sum())

    class Count(Classify):
        def val_step(self, batch: Any) -> Tensor:
            logits = self.models["net"](batch[0])
            self.log("correct", (logits.argmax(1) == batch[1]).sum(), reduce="sum")
            return F.cross_entropy(logits, batch[1])

    def frozen(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    try:
        net.norm.momentum = 0.0  # type: ignore[assignment]  # training does not change the buffers
        pipe = make_pipe(tmp_path, net=net, optimizer=frozen)
        mine = range(pipe.world.rank, 1003, size)
        shards = [torch.tensor(mine[start : start + 64]) for start in range(0, len(mine), 64)]
        pipe.register_dataset("train", Batches(1))
        pipe.register_dataset("val", [(x[index], y[index]) for index in shards])
        pipe.append_stage(Count(), max_epochs=1)
        pipe.run()
    finally:
        if size == 1:
            dist.leave()
    assert pipe.history["val/correct"] == [correct]
    assert pipe.history["val/loss"] == [pytest.approx(loss, rel=1e-6)]


@ranks(3)
def test_a_rank_without_validation_data_takes_part(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(2, rank=hw.rank()))
    pipe.register_dataset("val", Batches(0 if hw.rank() == 1 else 3, rank=hw.rank()))
    pipe.append_stage(Classify(), max_epochs=2)
    pipe.run()
    assert len(set(hw.all_gather_object(tuple(pipe.history["val/loss"])))) == 1
    assert len(pipe.history["val/loss"]) == 2


class Count(TorchDispatchMode):
    """Counts what makes the host wait for a device, or ranks for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_to_copy"):
            self.calls[name] += 1
        if function.namespace == "c10d":
            self.calls["collective"] += 1
        return function(*args, **(kwargs or {}))


class Quiet(TrainValStage):
    """Logs in each step, as a user would, and waits for nothing itself."""

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).double().mean(), weight=len(y))
        self.log("least", logits.min(), reduce="min")
        self.log("vector", logits.mean(0), weight=len(y))
        return F.cross_entropy(logits, y)


@ranks(2)
def test_between_log_points_nothing_is_waited_for_and_nothing_is_sent(tmp_path: Path) -> None:
    counts: list[Counter[str]] = []

    class Watched(Quiet):
        mode: Count | None = None

        def train_step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done % 10 == 1:  # from the end of this step's forward ...
                self.mode = Count()
                loss = super().train_step(batch)
                self.mode.__enter__()
                return loss
            loss = super().train_step(batch)
            if (
                self.pipe.steps_done % 10 == 8 and self.mode is not None
            ):  # ... to the end of that of a later one
                self.mode.__exit__(None, None, None)
                counts.append(self.mode.calls)
            return loss

    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))
    pipe = make_pipe(tmp_path, net=net, ema=0.9)
    pipe.register_dataset("train", Batches(40, rank=hw.rank()))
    pipe.append_stage(Watched(log_every=10, gradient_clip=1.0), max_epochs=1)
    pipe.run()
    assert len(counts) == 4
    for calls in counts:  # of seven steps: DDP's own collective (one bucket), and the stage's own `.double()`
        assert calls == {"collective": 7, "_to_copy": 7}


@ranks(2)
def test_a_log_point_costs_one_collective_and_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "reduce_scatter"):
        original = getattr(c10d, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(c10d, name, counted)

    class Reset(Quiet):
        def train_step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 15:
                calls.clear()
            if self.pipe.steps_done == 35:
                seen.update(calls)
            return super().train_step(batch)

    seen: Counter[str] = Counter()
    pipe = make_pipe(tmp_path, net=nn.Sequential(nn.Linear(FEATURES, 3)))
    pipe.register_dataset("train", Batches(40, rank=hw.rank()))
    pipe.append_stage(Reset(log_every=10, gradient_clip=1.0), max_epochs=1)
    pipe.run()
    assert seen == {"all_gather": 2}  # steps 20 and 30


class Gan(Stage):
    """Two players, each with its own optimizer."""

    def run_epoch(self) -> None:
        players: Any = self.models
        optimizers = self.pipe.optimizers
        for x, _ in self.batches("train"):
            fake = players["maker"](torch.randn_like(x))
            loss_d = (
                F.softplus(-players["judge"](x)).mean() + F.softplus(players["judge"](fake.detach())).mean()
            )
            optimizers["judge"].zero_grad()
            loss_d.backward()
            self.step_optimizer("judge")
            loss_g = F.softplus(-players["judge"](fake)).mean()
            optimizers["maker"].zero_grad()
            loss_g.backward()
            self.step_optimizer("maker")
            self.log("loss_d", loss_d, weight=len(x))
            self.log("loss_g", loss_g, weight=len(x))


@ranks(2)
def test_a_loop_of_ones_own_with_two_optimisers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = Pipeline(name="gan", root=tmp_path)
    for name, out in (("maker", FEATURES), ("judge", 1)):
        pipe.register_model(name, nn.Linear(FEATURES, out), ema=0.9)
        pipe.register_optimizer(name, sgd, model=name, scheduler=warm_up)
    pipe.register_dataset("train", Batches(25, rank=hw.rank()))
    pipe.append_stage(Gan(log_every=10), max_epochs=2, max_steps=40)
    pipe.run()
    assert pipe.steps_done == 40
    assert [step for step, _ in pipe.history.points("loss_g")] == [10, 20, 25, 30, 40]
    assert [scheduler.last_epoch for scheduler in pipe.schedulers.values()] == [40, 40]
    weights = [model.bare.weight.tolist() for model in pipe.registered_models.values()]  # type: ignore[union-attr, operator]
    assert hw.all_gather_object(weights) == [weights] * 2


@alone
@pytest.mark.parametrize("by", ["max_steps", "stop_stage"])
def test_a_stage_that_has_made_its_last_step_takes_no_batch_of_its_next_dataset(
    by: str, tmp_path: Path
) -> None:
    class InTurn(Stage):
        def run_epoch(self) -> None:
            for name in ("train", "more"):
                for _ in self.batches(name):
                    if by == "stop_stage" and self.steps_done == 2:
                        self.stop_stage()

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(3))
    pipe.register_dataset("more", Batches(2))
    pipe.append_stage(InTurn(log_every=1), max_epochs=2, max_steps=3 if by == "max_steps" else None)
    pipe.run()
    assert pipe.steps_done == 3


@alone
def test_a_stage_steps_only_its_own_optimisers(tmp_path: Path) -> None:
    class Only(Classify):
        def optimizers(self) -> list[torch.optim.Optimizer]:
            return [self.pipe.optimizers["sgd"]]

    pipe = make_pipe(tmp_path)
    other = nn.Linear(3, 3)
    before = other.weight.clone()
    pipe.register_model("other", other)
    pipe.register_optimizer("other", lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=1.0), model="other")
    pipe.register_dataset("train", Batches(3))
    pipe.append_stage(Only(), max_epochs=1)
    other.weight.grad = torch.ones_like(other.weight)
    pipe.run()
    assert torch.equal(other.weight, before)
    assert other.weight.grad is None, "or it would be part of a later step of that optimizer"


@alone
def test_schedulers_by_epoch_and_on_a_plateau(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    pipe.register_model("net", make_net())
    pipe.register_optimizer(
        "sgd",
        lambda p: torch.optim.SGD(p, lr=1.0),
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1),
        monitor="val/constant",
    )

    class Flat(Classify):
        def val_step(self, batch: Any) -> None:
            self.log("constant", 1.0, weight=len(batch))

    pipe.register_dataset("train", Batches(2))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Flat(), max_epochs=3)
    pipe.run()
    assert pipe.optimizers["sgd"].param_groups[0]["lr"] == pytest.approx(0.01)


@alone
def test_a_scheduler_by_epoch_rests_while_another_stage_trains(tmp_path: Path) -> None:
    class Only(Classify):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.trained = name

        def optimizers(self) -> list[torch.optim.Optimizer]:
            return [self.pipe.optimizers[self.trained]]

    def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    pipe, rates = make_pipe(tmp_path), list[list[float]]()
    for name in ("head", "all", "both"):
        pipe.register_optimizer(name, sgd, model="net", scheduler=halve, every="epoch")
    pipe.register_dataset("train", Batches(1))
    for name, epochs in (("head", 2), ("all", 1), ("both", 1)):
        stage = Only(name)
        stage.post_stage = lambda: rates.append(  # type: ignore[method-assign]
            [pipe.optimizers[each].param_groups[0]["lr"] / 0.05 for each in ("head", "all", "both")]
        )
        pipe.append_stage(stage, max_epochs=epochs, name=name)
    pipe.run()
    assert rates == [[0.25, 1.0, 1.0], [0.25, 0.5, 1.0], [0.25, 0.5, 0.5]]


class Auroc:
    """The interface of a torchmetrics metric."""

    def __init__(self) -> None:
        self.seen = 0

    def compute(self) -> Tensor:
        return torch.tensor(float(self.seen))

    def reset(self) -> None:
        self.seen = 0


@alone
def test_metrics_that_compute_themselves(tmp_path: Path) -> None:
    class Measured(Classify):
        def pre_stage(self) -> None:
            self.metric = Auroc()
            self.add_metric("auroc", self.metric)

        def step(self, batch: Any) -> Tensor:
            self.metric.seen += 1
            return super().step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(3))
    pipe.append_stage(Measured(), max_epochs=2)
    pipe.run()
    assert pipe.history["auroc"] == [3.0, 3.0]


class Explode(Classify):
    """The loss of rank 1 is not finite in some steps (there are ranks 0 to 1)."""

    bad: tuple[int, ...] = (13,)

    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        if self.pipe.steps_done + 1 in self.bad and self.pipe.world.rank == self.pipe.world.world_size - 1:
            return loss * float("nan")
        return loss


@ranks(2)
def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(100, rank=hw.rank()))
    pipe.append_stage(Explode(log_every=10), max_epochs=1)
    with pytest.raises(HeadwayError, match="became non-finite at step 13, on rank 1;"):
        pipe.run()  # the gradients of step 13 went to both ranks, so both are lost afterwards
    assert pipe.steps_done == 20


@ranks(2)
def test_or_its_step_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(40, rank=hw.rank()))
    stage = Explode(log_every=10, on_nan="skip")
    stage.bad = (13, 14, 30)
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    assert pipe.history["train/skipped_steps"] == [3]  # steps, not steps times ranks
    assert torch.tensor(pipe.history["train/loss"]).isfinite().all()
    weights = [p.tolist() for p in pipe.registered_models["net"].bare.parameters()]
    assert hw.all_gather_object(weights) == [weights] * 2
    assert all(torch.tensor(weight).isfinite().all() for weight in weights)


@alone
def test_too_many_steps_left_out_in_a_row_stop_the_run(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(40))
    stage = Explode(on_nan="skip", max_skips=3)
    stage.bad = tuple(range(5, 20))
    pipe.append_stage(stage, max_epochs=1)
    with pytest.raises(HeadwayError, match="gradients of 4 steps in a row, up to step 8, are non-finite"):
        pipe.run()


@alone
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_errors_and_interrupts_are_never_swallowed(error: type[BaseException], tmp_path: Path) -> None:
    class Fails(Classify):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done == 3:
                raise error
            return super().step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(40))
    pipe.append_stage(Fails(), max_epochs=1)
    with pytest.raises(error):
        pipe.run()
    (attempt,) = pipe.directory.info()["attempts"]
    assert attempt["status"] == ("interrupted" if error is KeyboardInterrupt else "failed")


@alone
def test_state_goes_into_another_pipeline(tmp_path: Path) -> None:
    """Half the epochs, state into a new pipeline, the other half: the same weights as without the break."""

    def make(epochs: int) -> Pipeline:
        pipe = make_pipe(tmp_path, ema=0.9, net=make_net(dropout=0.0))
        pipe.register_dataset("train", Batches(7))
        pipe.register_dataset("val", Batches(2))
        pipe.append_stage(Classify(), max_epochs=epochs)
        return pipe

    whole, first, second = make(4), make(2), make(4)
    whole.run()
    first.run()
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.steps_done == whole.steps_done == 28
    assert second.history["val/loss"] == whole.history["val/loss"]
    ours, truth = second.state_dict(), whole.state_dict()
    for kind in ("models", "averages"):
        for name, tensor in truth[kind]["net"].items():
            assert torch.equal(ours[kind]["net"][name], tensor), name


@alone
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """10,000 steps; what grows by a float tensor per step would show as megabytes."""
    sizes: list[int] = []

    class Weighed(Quiet):
        def step(self, batch: Any) -> Tensor:
            if self.pipe.steps_done in (2_000, 9_999):
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss)
            return super().step(batch)

    pipe = make_pipe(tmp_path, net=nn.Sequential(nn.Linear(FEATURES, 3)))
    batch = next(iter(Batches(1)))
    pipe.register_dataset("train", [batch] * 1_000)
    pipe.append_stage(Weighed(log_every=50), max_epochs=10)
    pipe.run()
    assert sizes[1] - sizes[0] < 4 * 2**20, sizes


@pytest.mark.usefixtures("alone")
def test_the_training_loss_is_the_mean_over_samples_of_batches_of_any_size(tmp_path: Path) -> None:
    class Counting(Classify):
        def train_step(self, batch: Any) -> Tensor:
            return super().train_step(batch) * 0 + len(batch[1])  # type: ignore[operator, return-value]

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4, sizes=lambda number: (2, 10)[number % 2]))
    pipe.append_stage(Counting(log_every=4), max_epochs=1)
    pipe.run()
    assert pipe.history.points("train/loss") == [(4, pytest.approx((2 * 2 + 10 * 10) / 12))]
