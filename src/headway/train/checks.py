"""Checks of a pipeline: when a part is added, before the run, and in its first steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway import data
from headway.dist import World
from headway.errors import UsageError
from headway.run import config_text
from headway.run.passed_over import is_at_prompt
from headway.run.plain import leaves
from headway.system import files
from headway.system.jsonlines import parse_json
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.batches import FirstBatch
from headway.train.diagnose.profiler import asked_window
from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.metrics.meter import Value
from headway.train.stage import Stage

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState
    from headway.train.pipeline import Pipeline
    from headway.train.run_state import RunState
    from headway.train.train_val import TrainValStage


def check_new(kind: str, name: str, known: Mapping[str, object]) -> None:
    """Raises `UsageError` for a name that is not valid, or that is already registered."""
    _check_name(kind, name)
    if name in known:
        raise UsageError(f"a {kind} named {name!r} is already registered: choose another name")


def _check_name(kind: str, name: str) -> None:
    """Raises `UsageError` unless a name is a text that can be printed on one line."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(f"{name!r:.80} is not a valid name of a {kind}: give a line of printable text")


def check_dataset(name: str, loader: object, run: RunState) -> None:
    """Raises `UsageError` for an object that is not a dataset, or that is registered too late."""
    check_new("dataset", name, run.pipe.datasets)
    if not isinstance(loader, Iterable):
        raise UsageError(
            f"dataset {name!r} is of type {type(loader).__name__}: register an iterable over batches, such as a "
            "DataLoader"
        )
    if run.current_state is not None and run.checkpointer is not None:
        raise UsageError(
            f"dataset {name!r} is registered in stage {run.current_state.name!r}, after positions were restored: "
            "register it in pre_run of the pipeline or of a callback, or before run()"
        )


def find_parameters(pipe: Pipeline, optimizer: str, model: str | None) -> list[nn.Parameter]:
    """Returns the trainable parameters of one model or of all; raises `UsageError` if there is no such model."""
    if model is not None and model not in pipe.registered_models:
        known = ", ".join(repr(name) for name in pipe.registered_models) or "none"
        raise UsageError(
            f"optimizer {optimizer!r} needs model {model!r}; registered: {known}. Register the model first"
        )
    chosen = pipe.registered_models.values() if model is None else [pipe.registered_models[model]]
    return [p for one in chosen for p in one.bare.parameters() if p.requires_grad]


def check_is_stage(stage: object, method: str) -> None:
    """Raises `UsageError` if an argument of a method of the pipeline is not a stage."""
    if isinstance(stage, type):
        raise UsageError(f"{method} got the class {stage.__name__}: pass an instance, {stage.__name__}()")
    if not isinstance(stage, Stage):
        raise UsageError(
            f"{method} got {stage!r:.80}: pass an instance of a subclass of hw.TrainValStage or hw.Stage"
        )
    if "_loop" not in vars(stage):
        kind = type(stage).__name__
        raise UsageError(f"{kind}.__init__ does not call super().__init__(): call it, with the settings")


def check_stage(stage: Stage, name: str | None, others: Sequence[Stage]) -> None:
    """Raises `UsageError` unless this is a stage that can be appended under this name."""
    check_is_stage(stage, "append_stage")
    if "pipe" in vars(stage):
        raise UsageError(f"stage {stage.name!r} is part of a pipeline already: append a new one")
    _check_name("stage", name or stage.name)
    if any((name or stage.name) == other.name for other in others):
        raise UsageError(f"a stage named {name or stage.name!r} is already registered: pass another name=...")


def check_optimizers(stage: TrainValStage, returned: object) -> None:
    """Raises `UsageError` unless `optimizers()` returned registered optimizers, at least one."""
    known = stage.pipe.optimizers
    given = list(returned) if isinstance(returned, Collection) and not isinstance(returned, str) else []
    if not given or not all(isinstance(each, Optimizer) for each in given):
        shown = type(returned).__name__ if isinstance(returned, Optimizer) else f"{returned!r:.80}"
        raise UsageError(
            f"optimizers() of stage {stage.name!r} returned {shown}: return those that it steps in a list, such as "
            f"[self.pipe.optimizers[{next(iter(known), 'sgd')!r}]]"
        )
    if any(each not in known.values() for each in given):
        raise UsageError(
            f"optimizers() of stage {stage.name!r} returned an optimizer that is not registered, and would not be "
            "saved: call pipe.register_optimizer()"
        )


def check_train_dataset(stage: TrainValStage, loader: object) -> None:
    """Raises `UsageError` unless `train_dataset()` returned a registered loader."""
    known = stage.datasets.values()
    if any(loader is each for each in known) or any(isinstance(each, FirstBatch) for each in known):
        return  # with fake data, the registered object is not the one that the user has
    raise UsageError(
        f"train_dataset() of stage {stage.name!r} returned a {type(loader).__name__} that is not registered, whose "
        "epoch would not be set and whose position would not be saved: call pipe.register_dataset(name, loader) before "
        "run(), and return self.datasets[name]"
    )


def check_equal(stage: TrainValStage, lengths: Sequence[int] | None) -> None:
    """Raises `UsageError` if it is known that ranks have different numbers of training batches."""
    if lengths is not None and len(set(lengths)) > 1:
        counts = shorten_list([f"{length:,} on rank {rank}" for rank, length in enumerate(lengths)])
        raise UsageError(
            f"stage {stage.name!r} has different numbers of training batches: {counts}; "
            f'{_advice_for_equal_lengths(stage.train_dataset())}, limit_train_batches, or uneven="shortest"'
        )


def _advice_for_equal_lengths(loader: object) -> str:
    """Returns the settings that give all ranks equally many training batches."""
    if isinstance(loader, data.ShardLoader):
        return 'use shuffle=True, tail="drop"'
    if isinstance(loader, data.DataLoader):
        return "use shuffle=True, drop_last=True"
    return "use hw.data.DataLoader, drop_last=True"


def check_monitored(state: LoopState, last: Mapping[str, Value]) -> None:
    """Raises `UsageError` on all ranks, after an epoch, if a setting names a metric that has not appeared so far.

    `last` has the metrics of the epoch. Settings of the pipeline may name a metric of a later stage. The epoch is saved
    first, so that it is not lost.
    """
    run, pipe = state.run, state.pipe
    wanted = {} if state.early_stopping is None else {"early_stop": state.early_stopping.name}
    if state.stage is pipe.stages[-1]:
        if run.checkpointer and (best := run.checkpointer.settings.retention.keep_best):
            wanted["keep_best"] = best
        for name, schedule in run.schedules.items():
            if schedule.monitor is not None:
                wanted[f"the monitor of optimizer {name!r}"] = schedule.monitor
    missing = {setting: name for setting, name in wanted.items() if name not in last}
    if not missing or not state.has_validated:
        return
    known = pipe.history.names()
    for setting, name in missing.items():
        if name not in known:
            if run.checkpointer:
                run.checkpointer.finish()
            raise UsageError(
                f"{setting} is {name!r}, which no epoch has logged so far: give one of {', '.join(known) or 'none'}, "
                "or log it in every epoch"
            )


def keep_metric(name: str, metric: EpochMetric, world: World) -> None:
    """Makes a registered metric save its state, which torchmetrics do only if they are set to `persistent`."""
    if world.world_size > 1:
        raise UsageError(
            f"state {name!r} is a metric, which has a different state on each of the {world.world_size} ranks, and "
            "only one is saved: log sums with self.log(), or compute it in validations, which are repeated as a whole"
        )
    persistent = getattr(metric, "persistent", None)
    if callable(persistent):
        persistent(True)


def check_pipeline(run: RunState) -> None:
    """Raises `UsageError` for a pipeline that cannot run, before the run starts."""
    if run.directory is not None:
        where = ", in the cell that runs it" if is_at_prompt() else ""  # it then continues an interrupted run
        raise UsageError(f"this pipeline has already run: create a new Pipeline for each run{where}")
    if not run.pipe.stages:
        raise UsageError(
            "the pipeline has no stage: call pipe.append_stage(stage, max_epochs=...) before run()"
        )
    asked_window()


def check_registered(run: RunState) -> None:
    """Raises `UsageError` for registered parts that cannot work, or that are missing, before training starts."""
    pipe = run.pipe
    known = {id(p) for model in pipe.registered_models.values() for p in model.bare.parameters()}
    for name, optimizer in pipe.optimizers.items():
        for group in optimizer.param_groups:
            if any(id(p) not in known for p in group["params"]):
                raise UsageError(
                    f"optimizer {name!r} has parameters that no registered model has: register their model, or "
                    "pass a function that makes the optimizer from the parameters it gets"
                )
    for state in run.stage_states:
        state.check()


def watch_first_steps(run: RunState) -> None:
    """Adds checks to the first steps of sharded models: gradients, ties, and batches that ranks share."""

    def latest_batch() -> Any:
        return None if run.current_state is None else run.current_state.batch

    for model in run.pipe.registered_models.values():
        for optimizer in run.pipe.optimizers.values():
            model.watch(optimizer, latest_batch)


def check_optimizer(name: str, optimizer: object) -> None:
    """Raises `UsageError` for an object that is not an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer {name!r} is {optimizer!r:.80}: give an optimizer, or a function that makes one from the "
            "parameters it gets"
        )


def check_scheduler(name: str, scheduler: object, *, split: bool) -> None:
    """Raises `UsageError` for a scheduler that was made before the parameter groups of its optimizer were split."""
    if split and isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"the scheduler of optimizer {name!r} was made before its parameter groups were split by mesh: pass a "
            "function that makes the scheduler from the optimizer"
        )


def warn_of_unread_sweep(pipe: Pipeline) -> None:
    """Warns if this run is part of a sweep and its config has none of the values: all its runs may be the same."""
    if not pipe.world.is_root:
        return
    try:
        swept: Mapping[str, str] = parse_json(files.read_regular(pipe.directory.sweep_file))["settings"]
    except (OSError, ValueError, KeyError, TypeError):  # not part of a sweep, or its record is damaged
        return
    configured = {_normalize(value) for _, value in leaves(yaml.safe_load(config_text(pipe.config)))}
    if swept and not configured & {_normalize(value) for value in swept.values()}:
        logger.warning(
            "none of the values of the sweep (%s) is in the config of the run: the script has to read them, from "
            "--%s=..., and put them into hw.Pipeline(config=...)",
            ", ".join(f"{name}={value}" for name, value in swept.items()),
            next(iter(swept)),
        )


def _normalize(value: object) -> str:
    """Returns a setting as text; a number in any spelling gives the same text, such as 1e-3 and 0.001."""
    try:
        return str(float(str(value)))
    except ValueError:
        return str(value).lower()
