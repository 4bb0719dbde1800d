"""The sink for Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from headway.errors import UsageError
from headway.record.sinks.base import MetricRow, RunStatus, Sink, require_package, run_config
from headway.record.sinks.rows import scalars
from headway.run import Run


@final
@dataclass(kw_only=True)
class Wandb(Sink):
    """Feeds Weights & Biases; the run there has the name of the run directory and continues when the run is resumed.

    `step` is logged as a value of its own: W&B drops rows whose own step goes back, as it does after a restart.
    """

    title = "Weights & Biases"
    project: str | None = None
    """None: what WANDB_PROJECT says"""
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None
    """None: what WANDB_MODE says. Offline runs are written to the run directory, for `wandb sync`"""

    def __post_init__(self) -> None:
        require_package("wandb", self)
        if self.mode not in ("online", "offline", None):
            raise UsageError(f'mode={self.mode!r} is not a valid mode of W&B: use "online" or "offline"')

    def open(self, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            id=run.id,
            name=run.id,
            resume="allow",
            dir=run.path,
            config=run_config(run),
            settings=wandb.Settings(console="off"),
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self._run.log({**scalars(row), "step": row["step"], "epoch": row.get("epoch")})

    def close(self, status: RunStatus, exit_code: int) -> None:
        if status == "stopped":
            self._run.mark_preempting()  # it will be resumed
        self._run.finish(exit_code=exit_code)
