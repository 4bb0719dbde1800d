"""`Callback`: hooks on the progress of a pipeline, in an object separate from it."""

from __future__ import annotations

from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.train.metrics.meter import LogPoint
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage


class Callback:
    """Hooks to override; add it with `pipe.add_callback(callback)`.

    Each hook is called on all ranks, after the hook of the same name of the pipeline or the stage. There is no hook per
    step: what runs in every step belongs in the step.

        class Announce(hw.Callback):
            def post_epoch(self, stage):
                hw.print_root(stage.name, stage.epoch, stage.history["val/loss"][-1])

        pipe.add_callback(Announce())
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in dir(Callback):
            check_stays_method(cls, Callback, name, getattr(cls, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(type(self), name, None) is not None:
            check_stays_method(type(self), Callback, name, value)
        super().__setattr__(name, value)

    def pre_run(self, pipe: Pipeline) -> None: ...

    def resume_run(self, pipe: Pipeline) -> None:
        """Called when the state of an earlier attempt is restored, before training resumes."""

    def post_run(self, pipe: Pipeline) -> None: ...

    def pre_stage(self, stage: Stage) -> None: ...

    def post_stage(self, stage: Stage) -> None: ...

    def pre_epoch(self, stage: Stage) -> None: ...

    def post_epoch(self, stage: Stage) -> None: ...

    def log_point(self, stage: Stage, kind: str, point: LogPoint) -> None:
        """Called at log points; `kind` is "train" or "validation", `point.values` are the reduced metrics."""


def defines_hook(callback: Callback, name: str) -> bool:
    """Whether the user has defined this hook of a callback, in its class or by assignment."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)


def check_stays_method(kind: type, home: type, name: str, value: object, caller: str = "the loop") -> None:
    """Raises `UsageError` if a user's class has a value where `home`, headway's own class, has a method."""
    if name.startswith("_") or callable(value) or getattr_static(home, name, None) is None:
        return
    raise UsageError(
        f"{kind.__name__} sets {name!r} to {value!r:.80}, but {caller} calls {name}(): define it as a method, or "
        "choose another name"
    )
