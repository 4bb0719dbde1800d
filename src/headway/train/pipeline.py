"""`Pipeline`: the models, optimizers, datasets and stages of a run; `run` trains them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway import dist
from headway.checkpoint.weights.loading import Rename
from headway.dist import World
from headway.dist.control.stop import restoring_handlers
from headway.dist.group import current
from headway.dist.shared_run import choose_run
from headway.errors import UsageError
from headway.run import Run, check_name, config_text
from headway.run.choice import Choice
from headway.run.settings import RunSettings
from headway.system import environment
from headway.train import loop
from headway.train.batches import FirstBatch, closing_loaders
from headway.train.callback import Callback, check_stays_method, defines_hook
from headway.train.checks import (
    check_dataset,
    check_new,
    check_optimizer,
    check_pipeline,
    check_registered,
    check_scheduler,
    check_stage,
    find_parameters,
    keep_metric,
    watch_first_steps,
)
from headway.train.diagnose import smoke
from headway.train.diagnose.plan_check import PlanCheck
from headway.train.evaluate.methods import EvaluationMethods
from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.metrics.history import History
from headway.train.metrics.trackers import TrackerMethods
from headway.train.model.initial_weights import InitialWeights, WeightsLike
from headway.train.model.mesh_groups import split_param_groups
from headway.train.model.named_parts import NamedParts
from headway.train.model.parallel import Blocks, Compile, Parallel, RegisteredModel, prepare
from headway.train.model.schedules import SchedulerLike, make_schedule
from headway.train.resume.checkpointer import Checkpointer
from headway.train.resume.generators import OwnGenerator, SavedGenerator
from headway.train.resume.state import StatefulObject, gather, restore, restore_position
from headway.train.run_state import RunState
from headway.train.settings import CheckpointOptions, checkpoint_settings
from headway.train.stage import Stage, finish_open_steps

_SET_ONCE = frozenset(
    {
        *("world", "device", "history", "stages"),
        *("models", "registered_models", "optimizers", "schedulers", "datasets"),
    }
)
"""attributes that the constructor creates and that nothing may replace"""

OptimizerLike: TypeAlias = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


class Pipeline(EvaluationMethods, TrackerMethods):
    """A training run: models, optimizers and datasets, and the stages that use them.

        pipe = hw.Pipeline(config={"lr": 3e-4}, name="digits")
        pipe.register_model("net", net)
        pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=3e-4), model="net")
        pipe.register_dataset("train", loader)
        pipe.append_stage(Classify(), max_epochs=10)
        pipe.run()

    Runs with the same name and config resume each other. `free` are keys of the config in which they may differ, such
    as the number of steps: `free=("steps", "data.workers")`. The constructor calls `hw.init()` if the script has not.
    """

    _state: RunState

    def __init__(
        self,
        config: object = None,
        name: str = "run",
        *,
        root: str | Path = "runs",
        free: Collection[str] = (),
    ) -> None:
        self.world: World = dist.world() if dist.is_initialized() else dist.init()
        self.config = config
        self.name = check_name(name)  # now, before everything is registered
        self.device: torch.device = self.world.device
        self.datasets: dict[str, Iterable[Any]] = NamedParts("dataset")
        self.optimizers: dict[str, Optimizer] = NamedParts("optimizer")
        self.schedulers: dict[str, LRScheduler] = NamedParts("scheduler")
        self.models: dict[str, nn.Module] = NamedParts("model")
        """the models that training calls, wrapped for all ranks"""
        self.registered_models: dict[str, RegisteredModel] = NamedParts("model")
        """the same models with their wrappers; `bare` is the module that was registered"""
        self.stages: list[Stage] = []
        self.history = History()
        vars(self)["_state"] = RunState(self, root, RunSettings.of(config, free).free)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[: cls.__mro__.index(Pipeline)]:
            for name in vars(base):
                _refuse_clash(cls, name, getattr(cls, name, None), taken=_SET_ONCE)
                if name in ("name", "config"):
                    raise UsageError(
                        f"{cls.__name__} sets {name!r} itself: pass it to super().__init__({name}=...)"
                    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_ONCE or getattr(type(self), name, None) is not None or name == "_state":
            _refuse_clash(type(self), name, value, taken=_SET_ONCE.intersection(vars(self)))
        super().__setattr__(name, value)

    @property
    def steps_done(self) -> int:
        """Finished steps of all stages."""
        return self._state.steps_done

    @property
    def epoch(self) -> int:
        """Finished epochs of all stages."""
        return self._state.epoch

    @property
    def current_stage(self) -> Stage | None:
        """The stage that is running."""
        return self._state.current_stage

    def pre_run(self) -> None:
        """Called before the first stage."""

    def resume_run(self) -> None:
        """Called when the state of an earlier attempt is restored, before training resumes."""

    def post_run(self) -> None:
        """Called after the last stage."""

    # --- registration

    def register_model(
        self,
        name: str,
        model: nn.Module,
        *,
        parallel: Parallel = "ddp",
        sync_batchnorm: bool = False,
        compile: Compile = False,
        ema: float | None = None,
        activation_checkpointing: Blocks = (),
        init_from: WeightsLike | None = None,
        strict: bool = True,
        rename: Rename | None = None,
    ) -> nn.Module:
        """Moves a model to this rank's device and wraps it; returns the module to call in training.

        `parallel` is "ddp", "fsdp", "none", or `Ddp(...)`, `Fsdp(...)` or `Tp(...)` with settings. `compile` is True or
        a mode of `torch.compile`; `ema` is the decay of an average of the weights, which validation uses;
        `activation_checkpointing` lists the classes of modules that recompute their activations in backward.

        `init_from` is the source of the weights: a run, a checkpoint, a safetensors or torch file, a Hugging Face
        directory, or `hw.checkpoint.Weights(run, at="best", ema=True)`. `rename` maps prefixes of names in the source
        to prefixes in the model, or is a function. With `strict=False`, only tensors that match are loaded, and one
        line lists the others.
        """
        check_new("model", name, self.registered_models)
        self.registered_models[name] = prepare(
            name,
            model,
            self.world,
            parallel=parallel,
            sync_batchnorm=sync_batchnorm,
            compile=compile,
            ema=ema,
            activation_checkpointing=activation_checkpointing,
            initial=InitialWeights.of(init_from, strict=strict, rename=rename, root=self._state.root),
        )
        self._state.outputs_are_reused |= isinstance(compile, str)  # some modes use CUDA graphs
        self.models[name] = self.registered_models[name].wrapped
        return self.models[name]

    def register_optimizer(
        self,
        name: str,
        optimizer: OptimizerLike,
        *,
        scheduler: SchedulerLike | None = None,
        model: str | None = None,
        every: Literal["step", "epoch"] = "step",
        monitor: str | None = None,
    ) -> Optimizer:
        """Adds an optimizer, or a function that makes one from the parameters of `model` (all models if None).

        `scheduler` steps after each step of its optimizer, or after each epoch with `every="epoch"`. A scheduler that
        needs a metric, such as ReduceLROnPlateau, gets the epoch's value of `monitor`.
        """
        check_new("optimizer", name, self.optimizers)
        if not isinstance(optimizer, Optimizer) and callable(optimizer):
            optimizer = optimizer(find_parameters(self, name, model))
        check_optimizer(name, optimizer)
        check_scheduler(name, scheduler, split=split_param_groups(optimizer))
        self.optimizers[name] = optimizer
        schedule = make_schedule(name, optimizer, scheduler, every=every, monitor=monitor)
        if schedule is not None:
            self.schedulers[name], self._state.schedules[name] = schedule.scheduler, schedule
        return optimizer

    def register_dataset(self, name: str, loader: Iterable[Any]) -> None:
        """Adds a dataset: any iterable over batches, such as a DataLoader. Call it before `run`, or in `pre_run`."""
        check_dataset(name, loader, self._state)
        self.datasets[name] = FirstBatch(loader) if environment.is_on(environment.FAKE_DATA) else loader

    def append_stage(
        self,
        stage: Stage,
        max_epochs: int | None = None,
        *,
        max_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        """Adds a stage, which ends after `max_epochs` epochs or `max_steps` steps, whichever is first."""
        check_stage(stage, name, self.stages)
        loop_state = stage._loop
        loop_state.name = name or loop_state.name
        loop_state.set_limits(max_epochs=max_epochs, max_steps=max_steps)
        vars(stage)["pipe"] = self
        self.stages.append(stage)

    def add_callback(self, callback: Callback) -> None:
        """Adds an object with hooks that are called at stages, epochs and log points."""
        if not isinstance(callback, Callback):
            raise UsageError(
                f"add_callback got {callback!r:.80}: pass an instance of a subclass of hw.Callback"
            )
        self._state.callbacks.append(callback)

    def register_state(self, name: str, thing: StatefulObject | OwnGenerator) -> None:
        """Saves an object in checkpoints and restores it: anything with `state_dict` and `load_state_dict`.

        Its state consists of tensors and plain values and is the same on all ranks, or the save is refused. A generator
        of torch, numpy or Python is registered as it is.

        >>> pipe.register_state("queue", queue)
        """
        thing = self._checked_state(name, thing)
        if isinstance(thing, EpochMetric):
            keep_metric(name, thing, self.world)
        self._state.registered_state[name] = thing

    def register_rank_state(self, name: str, thing: StatefulObject | OwnGenerator) -> None:
        """Saves an object of which each rank has its own, such as an environment, and restores it on the same rank.

        On another number of ranks, the run is refused unless the object has `load_rank_states(states)`, which gets the
        states of all ranks in a list.

        >>> pipe.register_rank_state("env", env)
        """
        self._state.rank_states[name] = self._checked_state(name, thing)

    def _checked_state(self, name: str, thing: object) -> StatefulObject:
        check_new("state", name, self._state.registered_state | self._state.rank_states)
        if isinstance(thing, OwnGenerator):
            return SavedGenerator(thing)
        if not isinstance(thing, StatefulObject):
            raise UsageError(
                f"state {name!r} is of type {type(thing).__name__}: register an object with state_dict() and "
                "load_state_dict(), or a random number generator"
            )
        return thing

    def enable_checkpointing(
        self, root: str | Path | None = None, **options: Unpack[CheckpointOptions]
    ) -> None:
        """Saves checkpoints, so that the same command resumes a run that was stopped or killed.

        `root` is the directory of run directories; by default the pipeline's. The settings are `resume` ("auto",
        "never", "must" or a run directory), `every` ("10min", 500, "1ep"), `keep_last`, `keep_every`, `keep_best`
        ("val/loss", "max:val/accuracy") and `background`: see `headway.checkpoint.settings.CheckpointSettings`.
        HEADWAY_SAVE_EVERY overrides `every`, and HEADWAY_SAVE_IN_BACKGROUND=0 sets `background=False`.

        >>> pipe.enable_checkpointing("runs", every="10min", keep_last=3, keep_best="val/loss")
        """
        if root is not None:
            self._state.root = root
        self._state.checkpointer = Checkpointer(self._state, checkpoint_settings(options), loop.log_point)

    def enable_ledger(self) -> None:
        """Records the exact loss, the samples and the state of the random number generators of every step.

        Use it to compare runs, and with `headway runs samples RUN --step N`. HEADWAY_LEDGER=1 does the same.
        """
        self._state.ledger_enabled = True

    def enable_plan(self, plan: str | Path | None = None) -> None:
        """Compares memory and step time with a plan: from a file, or traced from the first stage when it starts.

        `headway plan ... --save plan.json` writes such a file. Without one, another process traces the step of the
        registered models with the shapes of a real batch, while the run trains.

        >>> pipe.enable_plan()
        """
        self.add_callback(PlanCheck(plan))

    # --- running

    def run(self) -> Run:
        """Runs all stages and returns the run. Exceptions and Ctrl-C end the run and are raised again."""
        run = self._state
        check_pipeline(run)
        if not (later := self._registers_later):
            check_registered(run)
        if smoke_part := smoke.requested_part():
            smoke.shorten(run, smoke_part)
        choice = self._choose()
        run.directory = choice.run
        if choice.finished and run.checkpointer:  # the rest of the script gets the trained models
            run.run_hook_once("pre_run", self, run.callbacks)  # it may register what is restored
            run.checkpointer.restore_finished(choice)
            current().trained = True
            return choice.run
        with restoring_handlers(), closing_loaders(run), run.recording(choice.run):
            run.run_hook_once("pre_run", self, run.callbacks)  # it may register what is trained and restored
            if later:
                check_registered(run)
            watch_first_steps(run)
            run.reporter.print_inputs(self.registered_models.values(), self.datasets)
            if run.checkpointer:
                run.checkpointer.start(choice)
            if run.media is not None:
                run.media.begin(run.steps_done)
            for stage in self.stages:
                state = stage._loop
                if state.ended:  # in an earlier attempt
                    run.repeat_pre_stage(state)
                    continue
                with run.running_stage(state):
                    for _ in loop.epochs(state):
                        stage.run_epoch()
                        finish_open_steps(state)
            if run.checkpointer:
                run.checkpointer.finish()
            if smoke_part:
                smoke.end(smoke_part)
            run.run_hook("post_run", self)
        if run.checkpointer:
            run.checkpointer.leave()
        return choice.run

    def _choose(self) -> Choice:
        """Chooses the run to train in, or returns the one that an evaluation with the same settings has created."""
        run = self._state
        name, resume = self.name, run.checkpointer.settings.resume if run.checkpointer else "never"
        fake = self._registers_later and environment.is_on(environment.FAKE_DATA)
        if fake or any(isinstance(loader, FirstBatch) for loader in self.datasets.values()):
            # weights from repeated batches are useless, so real and fake runs never resume each other
            name, resume = f"{name[:59]}-fake", "never" if resume == "never" else "auto"
        # a new run was created because there was none, so that "auto" and "never" mean the same
        settings = str(run.root), name, config_text(self.config), "auto" if resume == "never" else str(resume)
        if run.choice is None or run.choice[0] != settings:
            choice = choose_run(run.root, name=name, config=self.config, free=run.free, resume=resume)
            run.choice = settings, choice
        return run.choice[1]

    @property
    def _registers_later(self) -> bool:
        """Whether a `pre_run` of the user may register parts that the stages need."""
        own = type(self).pre_run is not Pipeline.pre_run or "pre_run" in vars(self)
        users = [each for each in self._state.callbacks if type(each) is not PlanCheck]
        return own or any(defines_hook(each, "pre_run") for each in users)

    @property
    def directory(self) -> Run:
        """The run directory, from `pre_run` on."""
        if self._state.directory is None:
            raise UsageError("the pipeline has no run directory yet: use it in pre_run or later")
        return self._state.directory

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save: tensors on their devices, all else as plain values."""
        return gather(self._state) | {"history": self.history.state_dict(with_rows=True)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict` into a pipeline with the same names registered."""
        restore_position(self._state, saved)
        restore(self._state, saved)


def _refuse_clash(kind: type[Pipeline], name: str, value: object, *, taken: Collection[str]) -> None:
    """Raises `UsageError` if a user's attribute would replace one that the user or the loop relies on."""
    if name == "_state" or name in taken or isinstance(vars(Pipeline).get(name), property):
        raise UsageError(
            f"{kind.__name__} sets {name!r}, which every pipeline has already: choose another name"
        )
    check_stays_method(kind, Pipeline, name, value, "the loop or the script")
