"""The sink for Weights & Biases."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from headway.errors import UsageError
from headway.record.media.index import MediaItem, read_histogram
from headway.record.sinks.base import (
    MetricRow,
    RunStatus,
    Sink,
    check_artifacts,
    find_artifacts,
    require_package,
    run_config,
)
from headway.record.sinks.rows import scalars
from headway.run import Run
from headway.system import files


@final
@dataclass(kw_only=True)
class Wandb(Sink):
    """Feeds Weights & Biases; the run there has the id of the run directory and continues when the run is resumed.

    `step` is logged as a value of its own: W&B drops rows whose own step goes back, as it does after a restart.
    """

    title = "Weights & Biases"
    project: str | None = None
    """None: the value of WANDB_PROJECT"""
    entity: str | None = None
    run_name: str | None = None
    """the name of the run in W&B, `name` of `pipe.enable_wandb`; None: the name of the run directory"""
    notes: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None
    """None: the value of WANDB_MODE. Offline runs are written to the run directory, for `wandb sync`"""
    save_code: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """further `wandb.Settings`, such as {"x_stats_sampling_interval": 30}"""
    artifacts: Sequence[str] = ()
    """files of the run directory that are uploaded when the run is done, such as "config.yaml" and "media/*/val" """
    shared: bool = False
    """whether all ranks write to the run, which then shows the devices of all nodes. Needs a server"""

    def __post_init__(self) -> None:
        require_package("wandb", self)
        if self.mode not in ("online", "offline", None):
            raise UsageError(f'mode={self.mode!r} is not a valid mode of W&B: use "online" or "offline"')
        if self.shared and self.mode == "offline":
            raise UsageError('shared=True needs a server: leave out mode="offline"')
        check_artifacts(self.artifacts)

    @property
    def feeds_all_ranks(self) -> bool:
        return self.shared

    def open(self, run: Run) -> None:
        import wandb

        primary = self.rank == 0
        arguments: dict[str, Any] = {
            "id": run.id,
            "dir": run.path,
            "project": self.project,
            "entity": self.entity,
        }
        if primary:  # the others join the run that it has made
            arguments |= {
                "name": self.run_name or run.id,
                "resume": "allow",
                "config": run_config(run),
                "notes": self.notes,
                "group": self.group,
                "job_type": self.job_type,
                "tags": self.tags,
                "save_code": self.save_code,
            }
        if not self.shared:
            arguments["mode"] = self.mode
        self._directory = run
        self._run = wandb.init(**arguments, settings=wandb.Settings(**self._settings()))
        if primary:
            self._run.define_metric("*", step_metric="step")

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of `wandb.Settings`; in a shared run, only rank 0 marks it as finished."""
        settings: dict[str, Any] = {"console": "off", **self.settings}
        if self.shared:
            primary = self.rank == 0
            settings |= {"mode": "shared", "x_label": f"rank-{self.rank}", "x_primary": primary}
            settings |= {"x_update_finish_state": primary, "x_stats_gpu_device_ids": [self.local_rank]}
        return settings

    def write(self, rows: Sequence[MetricRow]) -> None:
        prefix = f"rank-{self.rank}/" if self.rank else ""
        for row in rows:
            values = {prefix + name: value for name, value in scalars(row).items()}
            self._run.log({**values, "step": row["step"], "epoch": row.get("epoch")})

    def write_media(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            value = self._media(item)
            if value is not None:
                self._run.log({item.label: value, "step": item.step, "epoch": item.epoch})

    def _media(self, item: MediaItem) -> Any:
        import wandb

        path = item.path(self._directory)
        if item.kind == "text":
            return wandb.Html(
                f"<pre>{html.escape(files.read_regular(path).decode(errors='replace'))}</pre>", inject=False
            )
        if item.kind != "histogram":
            return wandb.Image(str(path), caption=item.caption or None)
        histogram = read_histogram(path)
        if histogram is None or len(histogram["counts"]) > wandb.Histogram.MAX_LENGTH:
            return None
        return wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))

    def close(self, status: RunStatus, exit_code: int) -> None:
        if status == "done" and self.rank == 0 and (found := find_artifacts(self._directory, self.artifacts)):
            import wandb

            artifact = wandb.Artifact(f"run-{self._directory.id}", type="run")
            for path in found:
                name = str(path.relative_to(self._directory.path))
                if path.is_dir():
                    artifact.add_dir(str(path), name=name)
                else:
                    artifact.add_file(str(path), name=name)
            self._run.log_artifact(artifact)
        if status == "stopped" and self.rank == 0:
            self._run.mark_preempting()  # it will be resumed
        self._run.finish(exit_code=exit_code)
