"""`Callback`: hooks on the progress of a pipeline, in an object separate from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
