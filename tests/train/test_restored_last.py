"""What was saved is restored after the hooks that had ended before the save, and before those that had not begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Ddp, Pipeline, TrainValStage

alone = pytest.mark.usefixtures("alone")
STEPS = 4  # of an epoch


class Cut(Exception):
    """The run ends here, as if it had been killed."""


class Fit(TrainValStage):
    """Cut before the step after `cut`, or in the hook of that name in the given epoch."""

    def __init__(self, cut: Any = None) -> None:
        super().__init__(val_every=None)
        self.cut = cut

    def hook(self, name: str) -> None:
        if self.cut == (name, self.pipe.epoch):
            raise Cut

    def step(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == self.cut:
            raise Cut
        (x,) = batch
        return F.mse_loss(F.dropout(self.models["net"](x), 0.5), x[:, :2])

    @property
    def net(self) -> Any:
        return self.pipe.registered_models["net"].bare

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.pipe.optimizers["sgd"]

    def pre_stage(self) -> None:
        self.hook("pre_stage")

    def pre_epoch(self) -> None:
        self.hook("pre_epoch")

    def post_epoch(self) -> None:
        self.hook("post_epoch")

    def post_stage(self) -> None:
        self.hook("post_stage")


class ResetsHead(Fit):
    def pre_stage(self) -> None:
        super().pre_stage()
        self.net[2].reset_parameters()
        self.optimizer.param_groups[0]["lr"] = 0.05


class Disturbs(Fit):
    """Every hook changes what is restored: weights, rates, random numbers."""

    def disturb(self) -> None:
        with torch.no_grad():
            self.net[0].weight.add_(torch.rand(()) * 0.1)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.state.clear()

    def pre_stage(self) -> None:
        super().pre_stage()
        self.disturb()

    def pre_epoch(self) -> None:
        super().pre_epoch()
        self.disturb()

    def post_stage(self) -> None:
        super().post_stage()
        self.disturb()


class Unfreezes(Fit):
    """Frozen at first; each layer is unfrozen in an epoch of its own, by a group of its own."""

    def pre_epoch(self) -> None:
        super().pre_epoch()
        if self.pipe.epoch == 1:
            self.net[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.01})


class AddsInHook(Fit):
    """The script adds groups on each start, here in another order than in the first."""

    order: tuple[int, ...] = (0, 2)

    def pre_stage(self) -> None:
        super().pre_stage()
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for layer in self.order:
            params = [p for p in self.net[layer].parameters() if id(p) not in known]
            if params:
                self.optimizer.add_param_group({"params": params, "lr": 0.01 * (layer + 1)})


class Regroups(Fit):
    def pre_epoch(self) -> None:
        super().pre_epoch()
        if self.pipe.epoch == 1:
            (group,) = self.optimizer.param_groups
            weights = [p for p in group["params"] if p.ndim > 1]
            rest = {**group, "params": [p for p in group["params"] if p.ndim == 1], "lr": 0.3}
            group["params"] = weights
            self.optimizer.param_groups.append(rest)


class HeldInEval(Fit):
    def pre_epoch(self) -> None:
        super().pre_epoch()
        if self.epoch == 1:
            self.net[3].eval()


class Widens(Fit):
    """Another shape, which only the hook of the first stage makes; later stages train it."""

    def widen(self) -> None:
        if self is self.pipe.stages[0]:
            self.net[0], self.net[2] = nn.Linear(4, 9), nn.Linear(9, 2)
            self.optimizer.param_groups[0]["params"] = list(self.net.parameters())
            self.optimizer.state.clear()

    def pre_stage(self) -> None:
        super().pre_stage()
        self.widen()


class WidensAfter(Widens):
    """A resumed run would not make this shape."""

    def pre_stage(self) -> None:
        Fit.pre_stage(self)

    def post_stage(self) -> None:
        super().post_stage()
        self.widen()


class Growing(nn.Module):
    """Buffers that do not exist, are None, or have another shape in a new model; one becomes None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("none", None)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("first", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not hasattr(self, "lazy"):
                self.register_buffer("lazy", torch.zeros(2, dtype=torch.float64))
            self.none = x.mean(0)[:2] if self.none is None else self.none * 0.9
            self.seen = torch.cat([self.seen, x[:1, 0]])
            self.lazy += self.seen.sum()
            self.first = None
        return self.inner(x) + self.none + self.seen.mean() + self.lazy.float()


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.BatchNorm1d(2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make(
    folder: Path,
    *stages: Fit,
    net: Callable[[], nn.Module] = chain,
    optimizer: Callable[[nn.Module], Any] | None = None,
    frozen: tuple[int, ...] = (),
    scheduler: Any = None,
    resume: Any = "auto",
) -> Pipeline:
    hw.seed(3)
    pipe = Pipeline(name="hooks", root=folder)
    model = net()
    pipe.register_model("net", model, parallel=Ddp(find_unused_parameters=True))
    pipe.register_optimizer("sgd", optimizer(model) if optimizer else sgd, scheduler=scheduler, model="net")
    for layer in frozen:
        model[layer].requires_grad_(False)  # type: ignore[index]
    x = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(1))
    loader = hw.data.DataLoader(torch.utils.data.TensorDataset(x), global_batch_size=8, shuffle=True, seed=1)
    pipe.register_dataset("train", loader)
    for number, stage in enumerate(stages):
        pipe.append_stage(stage, max_epochs=3, name=f"stage{number}")
    pipe.enable_checkpointing(every=2, background=False, resume=resume)
    return pipe


def weights(pipe: Pipeline) -> dict[str, Tensor]:
    (optimizer,) = pipe.optimizers.values()
    rates = {f"lr {n}": torch.tensor(group["lr"]) for n, group in enumerate(optimizer.param_groups)}
    return {**pipe.registered_models["net"].bare.state_dict(), **rates}


CUTS: tuple[Any, ...] = (
    2,  # before the first save within an epoch
    7,  # in an epoch: saved after its second step
    ("pre_epoch", 1),  # at an epoch's end
    ("post_epoch", 1),
    ("post_stage", 3),  # before `post_stage`
    ("pre_stage", 3),  # after it, between stages
    STEPS * 3 + 3,  # in the second stage
)


def cut_at(cut: Any, kind: type[Fit]) -> tuple[Fit, Fit]:
    """Two stages, of which one is cut."""
    first = not (cut == ("pre_stage", 3) or (isinstance(cut, int) and cut > STEPS * 3))
    return kind(cut if first else None), kind(None if first else cut)


def check_exact(folder: Path, kind: type[Fit], cuts: tuple[Any, ...] = CUTS, **options: Any) -> None:
    whole = make(folder, kind(), kind(), **options)
    whole.run()
    truth = weights(whole)
    for cut in cuts:
        with pytest.raises(Cut):
            make(folder, *cut_at(cut, kind), **options).run()
        resumed = make(folder, kind(), kind(), **options)
        resumed.run()
        assert len(resumed.directory.info()["attempts"]) == 2, cut
        ours = weights(resumed)
        assert ours.keys() == truth.keys(), cut
        for name, value in truth.items():
            if hw.rank() == 0 or "running" not in name:
                assert torch.equal(value, ours[name]), (cut, name)


def frozen_first(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model[2].parameters())  # type: ignore[index]


def without_head(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model[3].parameters())  # type: ignore[index]


@alone
@pytest.mark.parametrize("kind", [Fit, ResetsHead, Disturbs, HeldInEval, Widens])
def test_hooks_that_ended_before_the_save_have_no_effect_and_others_have_theirs(
    kind: type[Fit], tmp_path: Path
) -> None:
    check_exact(tmp_path, kind)


@ranks(2)
def test_on_two_ranks(tmp_path: Path) -> None:
    check_exact(tmp_path, Disturbs, (7,))


@alone
def test_groups_that_the_script_has_not_added_are_rebuilt_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_exact(tmp_path, Unfreezes, (STEPS + 3, STEPS * 2 + 3), optimizer=frozen_first, frozen=(0,))
    said = " ".join(capfd.readouterr().err.split())
    grouped = (
        "optimizer 'sgd': parameters are grouped as in the checkpoint, and not as in the script (net.0.weight"
    )
    assert said.count(grouped) == 1, "in the epoch of the hook, the script adds the group itself"
    thawed = "model 'net': parameters are frozen and unfrozen as in the checkpoint, and not as in the script (0.weight"
    assert said.count(thawed) == 1


@alone
def test_groups_that_a_hook_adds_are_matched_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = make(tmp_path, AddsInHook(), optimizer=without_head)
    whole.run()
    with pytest.raises(Cut):
        make(tmp_path, AddsInHook(7), optimizer=without_head).run()
    capfd.readouterr()
    other = AddsInHook()
    other.order = (2, 0)
    resumed = make(tmp_path, other, optimizer=without_head)
    resumed.run()
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(whole).items())
    assert "as in the checkpoint" not in capfd.readouterr().err


@alone
def test_groups_that_a_hook_has_split_are_rebuilt(tmp_path: Path) -> None:
    check_exact(tmp_path, Regroups, (STEPS + 3, STEPS * 2 + 3))


@alone
@pytest.mark.parametrize("scheduler", [None, lambda o: torch.optim.lr_scheduler.StepLR(o, 100)])
def test_new_settings_are_applied_to_the_groups_of_the_script(
    scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to those that a hook has added or split off, and whatever the order of groups in the script."""

    def in_order(layers: tuple[int, ...], factor: float) -> Callable[[nn.Module], Any]:
        def build(model: nn.Module) -> torch.optim.Optimizer:
            groups = [{"params": model[n].parameters(), "lr": factor * n, "momentum": 0.9} for n in layers]  # type: ignore[index]
            return torch.optim.SGD(groups)

        return build

    options = {"frozen": (0,), "scheduler": scheduler}
    with pytest.raises(Cut):
        make(tmp_path, Unfreezes(STEPS + 3), optimizer=in_order((2, 3), 0.1), **options).run()
    monkeypatch.setenv("HEADWAY_APPLY", "1")
    resumed = make(tmp_path, Unfreezes(), optimizer=in_order((3, 2), 0.01), **options)
    resumed.run()
    groups = resumed.optimizers["sgd"].param_groups
    found = {tuple(group["params"][0].shape): group["lr"] for group in groups}
    assert found == pytest.approx({(2, 6): 0.02, (2,): 0.03, (6, 4): 0.01})


@alone
def test_a_finished_run_restores_what_a_hook_has_made(tmp_path: Path) -> None:
    class Logs(Widens):
        def pre_stage(self) -> None:
            super().pre_stage()
            self.log("began", 1.0)

    whole = make(tmp_path, Logs(), Fit())
    whole.run()
    again = make(tmp_path, Logs(), Fit(), resume=whole.directory.path)
    again.run()
    assert again.directory.id == whole.directory.id
    assert len(again.directory.info()["attempts"]) == 1, "nothing is trained"
    assert all(torch.equal(weights(again)[name], value) for name, value in weights(whole).items())


@alone
@pytest.mark.parametrize(("kind", "count"), [(Widens, 0), (WidensAfter, 1)])
def test_shapes_that_a_resume_would_not_make_are_named_when_they_are_saved(
    kind: type[Fit], count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, kind(), kind()).run()
    said = " ".join(capfd.readouterr().err.split())
    named = "parameters have other shapes than pre_run and pre_stage made (net.0.weight, net.0.bias, net.2.weight)"
    assert said.count(named) == count
    assert said.count("other shapes") == count


@alone
def test_buffers_that_training_makes_are_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_exact(tmp_path, Fit, (3, STEPS + 3), net=Growing)
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("model 'net': buffers have the shapes of the checkpoint") == 2


@alone
def test_resume_run_may_change_what_was_restored_and_draws_no_number_of_training(tmp_path: Path) -> None:
    rates: list[float] = []

    class Noted(Fit):
        def step(self, batch: Any) -> Tensor:
            rates.append(self.optimizer.param_groups[0]["lr"])
            return super().step(batch)

    class Changes(Pipeline):
        def resume_run(self) -> None:
            assert self.optimizers["sgd"].state, "restored before"
            self.optimizers["sgd"].param_groups[0]["lr"] = 0.7
            torch.rand(5)

    def losses(rate: float | None) -> list[float]:
        folder = tmp_path / str(rate)
        folder.mkdir()
        with pytest.raises(Cut):
            make(folder, Noted(7)).run()
        rates.clear()
        resumed = make(folder, Noted())
        if rate is not None:
            resumed.resume_run = lambda: Changes.resume_run(resumed)  # type: ignore[method-assign, arg-type]
        resumed.run()
        return rates[:]

    assert losses(None)[0] == 0.1
    assert losses(0.7)[:2] == [0.7, 0.7]


@alone
def test_state_that_differs_after_it_was_restored_is_refused(tmp_path: Path) -> None:
    class Forgets:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def pipe(cut: int | None) -> Pipeline:
        made = make(tmp_path, Fit(cut))
        made.register_state("forgets", forgets := Forgets())
        forgets.count = 7 if cut else 0
        return made

    with pytest.raises(Cut):
        pipe(7).run()
    resumed = pipe(None)
    with pytest.raises(
        UsageError, match=r"state 'forgets': 'count' is not what the checkpoint of step 6 has"
    ):
        resumed.run()
    assert resumed.directory.info()["attempts"][-1]["exit_code"] == 2
