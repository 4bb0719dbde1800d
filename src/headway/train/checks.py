"""What a pipeline refuses, each with one sentence: when a part is added, before the run, and in its first steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError
from headway.train.stage import Stage

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline


def check_new(kind: str, name: str, known: Mapping[str, object]) -> None:
    """Raises `UsageError` for a name that is not text, or that was registered before."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r:.80} is not a valid name of a {kind}: give a text that is not empty")
    if name in known:
        raise UsageError(f"a {kind} named {name!r} is already registered: choose another name")


def check_stage(stage: Stage, name: str | None, others: Sequence[Stage]) -> None:
    """Raises `UsageError` for what is not a stage that can be appended under this name."""
    if isinstance(stage, type):
        raise UsageError(f"append_stage got the class {stage.__name__}: pass an instance, {stage.__name__}()")
    if not isinstance(stage, Stage):
        raise UsageError(
            f"append_stage got {stage!r:.80}: pass an instance of a subclass of hw.TrainValStage or hw.Stage"
        )
    if "_loop" not in vars(stage):
        kind = type(stage).__name__
        raise UsageError(f"{kind}.__init__ does not call super().__init__(): call it, with the settings")
    if "pipe" in vars(stage):
        raise UsageError(f"stage {stage.name!r} is part of a pipeline already: append a new one")
    if any((name or stage.name) == other.name for other in others):
        raise UsageError(f"a stage named {name or stage.name!r} is already registered: pass another name=...")


def check_pipeline(pipe: Pipeline) -> None:
    """Raises `UsageError` for what cannot work, before the run starts."""
    if pipe._run is not None:
        raise UsageError("this pipeline has already run: create a new Pipeline for each run")
    if not pipe.stages:
        raise UsageError(
            "the pipeline has no stage: call pipe.append_stage(stage, max_epochs=...) before run()"
        )
    known = {id(p) for model in pipe.registered_models.values() for p in model.bare.parameters()}
    for name, optimizer in pipe.optimizers.items():
        for group in optimizer.param_groups:
            if any(id(p) not in known for p in group["params"]):
                raise UsageError(
                    f"optimizer {name!r} has parameters that no registered model has: register their model, or "
                    "pass a function that makes the optimizer from the parameters it gets"
                )
    for stage in pipe.stages:
        stage._loop.check()


def watch_first_steps(pipe: Pipeline) -> None:
    """Has the first steps of sharded models checked: gradients, ties, and batches that ranks share."""

    def latest_batch() -> Any:
        return None if pipe.current_stage is None else pipe.current_stage._loop.batch

    for model in pipe.registered_models.values():
        for optimizer in pipe.optimizers.values():
            model.watch(optimizer, latest_batch)
