"""`Callback`: an object that a pipeline tells about its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.train.metrics.meter import LogPoint
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage


class Callback:
    """Override what you want to hear of; `pipe.add_callback(callback)`. Called on all ranks, after the subject's own
    hook of that name. Nothing is called per step: what runs every step belongs into the step."""

    def pre_run(self, pipe: Pipeline) -> None: ...

    def resume_run(self, pipe: Pipeline) -> None:
        """The state of an earlier attempt is back, and training goes on from there."""

    def post_run(self, pipe: Pipeline) -> None: ...

    def pre_stage(self, stage: Stage) -> None: ...

    def post_stage(self, stage: Stage) -> None: ...

    def pre_epoch(self, stage: Stage) -> None: ...

    def post_epoch(self, stage: Stage) -> None: ...

    def log_point(self, stage: Stage, kind: str, point: LogPoint) -> None:
        """`kind` is "train" or "validation"; `point.values` are the metrics of all ranks together."""
