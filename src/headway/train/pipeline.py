"""`Pipeline`: the models, optimizers, datasets and stages of a run; `run` trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway import dist, record
from headway.checkpoint.weights.loading import Rename
from headway.dist import World
from headway.dist.group import current
from headway.dist.shared_run import choose_run
from headway.errors import UsageError
from headway.record.media.writer import MediaSettings, MediaWriter
from headway.record.sinks import Sink, feeding
from headway.run import Run, check_name
from headway.system import environment
from headway.system.log import logger
from headway.train import loop
from headway.train.batches import FirstBatch, closing_loaders, set_epoch
from headway.train.callback import Callback
from headway.train.checks import (
    check_dataset,
    check_monitored,
    check_new,
    check_optimizer,
    check_pipeline,
    check_registered,
    check_scheduler,
    check_stage,
    find_parameters,
    keep_metric,
    warn_of_unread_sweep,
    watch_first_steps,
)
from headway.train.diagnose import smoke
from headway.train.diagnose.evidence import explain_out_of_memory
from headway.train.diagnose.plan_check import PlanCheck, with_plan
from headway.train.diagnose.profiler import profiling
from headway.train.evaluate.methods import EvaluationMethods
from headway.train.loop_state import StageStatus
from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.metrics.history import History, MetricRow
from headway.train.metrics.meter import LogPoint
from headway.train.metrics.reporter import Reporter
from headway.train.metrics.stragglers import Stragglers, busy
from headway.train.metrics.timing import PhaseTimer
from headway.train.metrics.trackers import TrackerMethods
from headway.train.model.initial_weights import InitialWeights, WeightsLike
from headway.train.model.mesh_groups import split_param_groups
from headway.train.model.named_parts import NamedParts
from headway.train.model.parallel import Blocks, Compile, Parallel, RegisteredModel, prepare
from headway.train.model.schedules import Schedule, SchedulerLike, make_schedule
from headway.train.resume import state
from headway.train.resume.checkpointer import Checkpointer
from headway.train.resume.end_of_run import wait_for_others
from headway.train.resume.ledger_writer import LedgerWriter
from headway.train.resume.state import StatefulObject
from headway.train.settings import CheckpointOptions, checkpoint_settings
from headway.train.stage import Stage, finish_open_steps

OptimizerLike: TypeAlias = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


class Pipeline(EvaluationMethods, TrackerMethods):
    """A training run: models, optimizers and datasets, and the stages that use them.

        pipe = hw.Pipeline(config={"lr": 3e-4}, name="digits")
        pipe.register_model("net", net)
        pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=3e-4), model="net")
        pipe.register_dataset("train", loader)
        pipe.append_stage(Classify(), max_epochs=10)
        pipe.run()

    The constructor calls `hw.init()` if the script has not.
    """

    def __init__(self, config: object = None, name: str = "run", *, root: str | Path = "runs") -> None:
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
        self._timer = PhaseTimer(self.device, alone=self.world.world_size == 1)
        self.steps_done = 0
        """finished steps of all stages"""
        self.epoch = 0
        """finished epochs of all stages"""
        self.current_stage: Stage | None = None
        self._run: Run | None = None
        self._outputs_are_reused = False  # whether a model's next call overwrites them, as with CUDA graphs
        self._registered_state: dict[str, StatefulObject] = {}
        self._checkpointer: Checkpointer | None = None
        self._ledger: LedgerWriter | None = None
        self._ledger_enabled = environment.is_on(environment.LEDGER)
        # what this rank spent on its own between log points, and in all
        self._busy_s = self._interval_s = 0.0
        self._stragglers = Stragglers()
        self._root = root
        self._callbacks: list[Callback] = []
        self._hooks_called: dict[tuple[str, int], object] = {}  # kept, since ids are used again
        self._sinks: list[Sink] = []
        self._media: MediaWriter | None = None
        self._media_settings = MediaSettings()
        self._schedules: dict[str, Schedule] = {}
        self._open_reporter: Reporter | None = None

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

        `init_from` is where its weights come from: a run, a checkpoint, a safetensors or torch file, a directory of
        Hugging Face, or `hw.checkpoint.Weights(run, at="best", ema=True)`. `rename` maps beginnings of names in there
        to those in the model, or is a function; with `strict=False`, what matches is loaded, and one line says what
        does not.
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
            initial=InitialWeights.of(init_from, strict=strict, rename=rename, root=self._root),
        )
        self._outputs_are_reused |= isinstance(compile, str)  # some modes use CUDA graphs
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
            self.schedulers[name], self._schedules[name] = schedule.scheduler, schedule
        return optimizer

    def register_dataset(self, name: str, loader: Iterable[Any]) -> None:
        """Adds a dataset: any iterable over batches, such as a DataLoader. Call it before `run`, or in `pre_run`."""
        check_dataset(name, loader, self)
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
        self._callbacks.append(callback)

    def register_state(self, name: str, thing: StatefulObject) -> None:
        """Saves an object in checkpoints and restores it: anything with `state_dict` and `load_state_dict`.

        Its state consists of tensors and plain values and is the same on all ranks; rank 0's is saved.

        >>> pipe.register_state("queue", queue)
        """
        check_new("state", name, self._registered_state)
        if not isinstance(thing, StatefulObject):
            raise UsageError(
                f"state {name!r} is of type {type(thing).__name__}: register an object with state_dict() and "
                "load_state_dict()"
            )
        if isinstance(thing, EpochMetric):
            keep_metric(name, thing, self.world)
        self._registered_state[name] = thing

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
        self._root = self._root if root is None else root
        self._checkpointer = Checkpointer(self, checkpoint_settings(options), loop.log_point)

    def enable_ledger(self) -> None:
        """Records the exact loss, the samples and the state of the random number generators of every step.

        Use it to compare runs, and with `headway runs samples RUN --step N`. HEADWAY_LEDGER=1 does the same.
        """
        self._ledger_enabled = True

    def enable_plan(self, plan: str | Path | None = None) -> None:
        """Compares memory and step time with a plan: that of a file, or one traced from the first stage at its start.

        A file is written by `headway plan ... --save plan.json`. Without one, the step of the registered models is
        traced by another process while the run trains, with its real batch.

        >>> pipe.enable_plan()
        """
        self.add_callback(PlanCheck(plan))

    # --- running

    def run(self) -> Run:
        """Runs all stages and returns the run. Exceptions and Ctrl-C end the run and are raised again."""
        check_pipeline(self)
        if not (later := self._registers_later):
            check_registered(self)
        if smoke_part := smoke.requested_part():
            smoke.shorten(self, smoke_part)
        name, resume = self.name, self._checkpointer.settings.resume if self._checkpointer else "never"
        fake = later and environment.is_on(environment.FAKE_DATA)
        if fake or any(isinstance(loader, FirstBatch) for loader in self.datasets.values()):
            # weights from repeated batches are useless: real and fake runs never resume each other
            name, resume = f"{name[:59]}-fake", "never" if resume == "never" else "auto"
        choice = choose_run(self._root, name=name, config=self.config, resume=resume)
        self._run = choice.run
        if choice.finished and self._checkpointer:  # what follows in the script gets what the run has made
            self._run_hook("pre_run", self)  # it may register what is restored
            self._checkpointer.restore_finished(choice)
            current().trained = True
            return choice.run
        with closing_loaders(self), self._recording(choice.run):
            self._run_hook("pre_run", self)  # it may register what is trained, and what is restored
            if later:
                check_registered(self)
            watch_first_steps(self)
            self._reporter.print_inputs(self.registered_models.values(), self.datasets)
            if self._checkpointer:
                self._checkpointer.start(choice)
            if self._media is not None:
                self._media.begin(self.steps_done)
            for stage in self.stages:
                if stage._loop.ended:
                    continue  # in an earlier attempt
                with self._running_stage(stage):
                    for _ in loop.epochs(stage):
                        stage.run_epoch()
                        finish_open_steps(stage)
            if self._checkpointer:
                self._checkpointer.finish()
            if smoke_part:
                smoke.end(smoke_part)
            self._run_hook("post_run", self)
        if self._checkpointer:
            self._checkpointer.leave()
        return choice.run

    @contextmanager
    def _recording(self, directory: Run) -> Iterator[None]:
        """Opens the rank logs, the metrics files, the ledger and the checkpoints of a run, and closes them."""
        with ExitStack() as stack:
            # after a failure, too
            stack.callback(vars(self).update, current_stage=None, _open_reporter=None, _media=None)
            recording = stack.enter_context(record.recording(directory, self.world, config=self.config))
            self._run = directory = recording.run
            warn_of_unread_sweep(self)
            ranks = {"rank": self.world.rank, "local_rank": self.world.local_rank}
            stack.enter_context(feeding(directory, self._sinks, **ranks))
            self._open_reporter = stack.enter_context(Reporter(directory, self.world, recording.events))
            if self._ledger_enabled:
                self._ledger = LedgerWriter(directory, self.world, attempt=recording.attempt)
                stack.enter_context(self._ledger)
            self._media = stack.enter_context(
                MediaWriter(directory, self._media_settings, world=self.world, attempt=recording.attempt)
            )
            if self._checkpointer:
                stack.enter_context(self._checkpointer.saving(recording))
            yield
            dist.set_phase("done")
            wait_for_others()

    @contextmanager
    def _running_stage(self, stage: Stage) -> Iterator[None]:
        """Surrounds all epochs of one stage: its hooks, its display, and the evidence if it runs out of memory."""
        self.current_stage = stage
        if self._checkpointer and stage._loop.status is StageStatus.NEW:
            self._checkpointer.restore_rng()
        shown = self._reporter.displaying(stage)
        with stage._loop.running(), shown, explain_out_of_memory(stage), profiling(stage):
            self._run_hook("pre_stage", stage)
            yield
            if self._checkpointer:
                self._checkpointer.restore_rng()  # if nothing but the hook was left to do
            self._run_hook("post_stage", stage)
            stage._loop.log_after_epoch()
            hooked, stage._loop.post_stage_due = stage._loop.post_stage_due, False
            if self._checkpointer:
                self._checkpointer.after_stage(stage, hooked=hooked)
        self.current_stage = None

    def _has_post_stage(self, stage: Stage) -> bool:
        """Whether the user has written a `post_stage`: it may change what the last epoch has saved."""
        own = type(stage).post_stage is not Stage.post_stage or "post_stage" in vars(stage)
        return own or any(type(each).post_stage is not Callback.post_stage for each in self._callbacks)

    @property
    def _registers_later(self) -> bool:
        """Whether a `pre_run` of the user may register what the stages need."""
        hooks = [type(each).pre_run for each in self._callbacks]
        own = type(self).pre_run is not Pipeline.pre_run or "pre_run" in vars(self)
        return own or any(hook not in (Callback.pre_run, PlanCheck.pre_run) for hook in hooks)

    # --- what the loop uses

    @property
    def directory(self) -> Run:
        """The run directory, from `pre_run` on."""
        if self._run is None:
            raise UsageError("the pipeline has no run directory yet: use it in pre_run or later")
        return self._run

    @property
    def _repeats_batches(self) -> bool:
        """Whether another rank computes on the same batches as this one and counts for both."""
        groups = [model.tensor_group for model in self.registered_models.values()]
        return any(group is not None and group.rank > 0 for group in groups)

    @property
    def _is_running(self) -> bool:
        """Whether a run is open, from `pre_run` to `post_run`."""
        return self._open_reporter is not None

    @property
    def _reporter(self) -> Reporter:
        if self._open_reporter is None:
            raise UsageError("the pipeline is not running: log between pre_run and post_run")
        return self._open_reporter

    def _run_hook(self, hook: str, subject: Pipeline | Stage) -> None:
        """Calls a hook of the subject, then of the callbacks; the hang check is off, since a hook may take any time."""
        with dist.no_hang_check():
            self._hooks_called[hook, id(subject)] = subject
            getattr(subject, hook)()
            for callback in self._callbacks:
                getattr(callback, hook)(subject)

    def _record_log_point(self, stage: Stage, kind: str, point: LogPoint) -> None:
        """Records the result of a log point or a validation."""
        if not point.values and not point.local:
            return
        seconds, point = self._timer.take(stage._loop.log_every), with_plan(stage, kind, point)
        if kind == "train":
            self._check_stragglers(point, seconds)
        seconds["compute"] = seconds.get("compute", 0.0) + seconds.pop("backward", 0.0)
        self.history.log_points.append(
            MetricRow(stage=stage.name, epoch=stage.epoch, step=self.steps_done, values=point.values)
        )
        self._reporter.log_point(stage, kind, point, seconds, self.steps_done)
        if self._checkpointer and kind == "validation":
            self._checkpointer.record_metrics(point.values)
        if self._callbacks:
            with dist.no_hang_check():
                for callback in self._callbacks:
                    callback.log_point(stage, kind, point)

    def _check_stragglers(self, point: LogPoint, seconds: Mapping[str, float]) -> None:
        slow = self._stragglers.observe(point.busy, whole=self._interval_s, sampled=self._timer.every > 1)
        if slow is not None and self.world.is_root:
            logger.warning(slow, extra={"event": "straggler"})
        self._busy_s, self._interval_s = busy(seconds)

    def _begin_epoch(self, stage: Stage) -> None:
        """Calls `pre_epoch`, and `set_epoch` of loaders that have not restored a position within the epoch."""
        in_epoch = stage._loop.status.in_epoch
        if self._checkpointer and not in_epoch:
            self._checkpointer.restore_rng()
        for loader in self.datasets.values():
            set_epoch(loader, self.epoch, in_place=in_epoch and isinstance(loader, StatefulObject))
        stage._loop.begin_epoch()
        self._run_hook("pre_epoch", stage)
        if self._checkpointer:  # what the hook drew in this attempt does not count
            self._checkpointer.restore_rng()
        dist.set_phase(stage.name, self.steps_done)

    def _end_epoch(self, stage: Stage, values: Mapping[str, Any]) -> None:
        """Counts an epoch and records its metrics."""
        self.history.epochs.append(
            MetricRow(stage=stage.name, epoch=stage.epoch, step=self.steps_done, values=values)
        )
        self._reporter.end_epoch(stage, values, self.steps_done)
        stage._loop.end_epoch()
        self.epoch += 1
        if self._checkpointer:
            self._checkpointer.record_metrics(values)

    def _apply_metrics(self, stage: Stage) -> None:
        """Uses the metrics of an epoch, those of `post_epoch` included: for early stopping, and for schedulers.

        A metric that a setting names must have appeared by now.
        """
        values = self.history.epochs[-1].values
        stage._loop.stop_early(values)
        for schedule in self._schedules.values():
            schedule.end_epoch(values)
        check_monitored(stage)

    def _extend_epoch(self, stage: Stage, point: LogPoint) -> None:
        """Adds what was logged after an epoch to its metrics."""
        row = self.history.epochs[-1] if self.history.epochs else None
        if row is None or row.stage != stage.name:
            return  # the stage has not had an epoch
        for name in point.values:
            if name in row.values:
                raise UsageError(
                    f"metric {name!r} was logged after the epoch that has it already: choose another name"
                )
        self.history.epochs[-1] = replace(row, values={**row.values, **point.values})
        self._reporter.extend_epoch(row, point)
        if self._checkpointer:
            self._checkpointer.record_metrics(point.values)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save: tensors on their devices, all else as plain values."""
        return state.gather(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into a pipeline with the same names registered."""
        state.restore(self, saved)
