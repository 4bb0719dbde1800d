"""The sink for MLflow."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import final

from headway.errors import UsageError
from headway.record.media.index import MediaItem
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
from headway.run.plain import leaves
from headway.system import files

_NAME_CHARACTERS = 250
"""the most that MLflow allows; of a longer name, the end is kept, which says more than its beginning"""


@final
@dataclass(kw_only=True)
class Mlflow(Sink):
    """Feeds an MLflow server or store; a resumed run finds its run there by the tag `headway.run`."""

    title = "MLflow"
    tracking_uri: str | None = None
    """None: the value of MLFLOW_TRACKING_URI"""
    experiment: str | None = None
    """None: the name of the run"""
    run_name: str | None = None
    """the name of the run in MLflow, `name` of `pipe.enable_mlflow`; None: the name of the run directory"""
    notes: str | None = None
    """its description there"""
    tags: Mapping[str, str] = field(default_factory=dict)
    artifact_location: str | None = None
    """where a new experiment keeps files; None: the default of the tracking server"""
    artifacts: Sequence[str] = ()
    """files of the run directory that are uploaded when the run is done, such as "config.yaml" and "media/*/val" """

    def __post_init__(self) -> None:
        require_package("mlflow", self)
        check_artifacts(self.artifacts)
        if not isinstance(self.tags, Mapping):
            raise UsageError(
                f'tags={self.tags!r:.80}: the tags of MLflow have values, such as {{"team": "vision"}}'
            )

    def open(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        name = self.experiment or run.name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name, artifact_location=self.artifact_location)
            if experiment is None
            else experiment.experiment_id
        )
        self._directory = run
        known = self._client.search_runs([experiment_id], filter_string=f"tags.`headway.run` = '{run.id}'")
        if known:
            made = known[0]
            self._client.update_run(made.info.run_id, status="RUNNING")
        else:
            notes = {} if self.notes is None else {"mlflow.note.content": self.notes}
            tags = {**self.tags, **notes, "headway.run": run.id}
            made = self._client.create_run(experiment_id, tags=tags, run_name=self.run_name or run.id)
        self._id = made.info.run_id
        for setting, value in leaves(run_config(run)):
            if (
                name := _valid_name(setting)
            ) not in made.data.params:  # a server may go away between two of them
                self._client.log_param(self._id, name, str(value)[:500])

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            milliseconds = round(row["time"] * 1000)
            metrics = [
                self._metric(_valid_name(name), value, milliseconds, row["step"])
                for name, value in scalars(row).items()
            ]
            if metrics:
                self._client.log_batch(self._id, metrics=metrics)

    def write_media(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            path = item.path(self._directory)
            if item.kind in ("image", "figure") and importlib.util.find_spec("PIL") is not None:
                from PIL import Image

                with Image.open(path) as image:
                    milliseconds = round(item.time * 1000)
                    self._client.log_image(
                        self._id, image, key=_valid_key(item.label), step=item.step, timestamp=milliseconds
                    )
            elif item.kind == "text":
                text = files.read_regular(path).decode(errors="replace")
                self._client.log_text(self._id, text, f"{PurePosixPath('media') / item.file}")
            else:
                self._client.log_artifact(self._id, str(path), str(PurePosixPath("media", item.file).parent))

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  MLflow has no exit codes
        for path in find_artifacts(self._directory, self.artifacts) if status == "done" else ():
            place = str(path.relative_to(self._directory.path).parent)
            self._client.log_artifact(self._id, str(path), None if place == "." else place)
        ended = {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, status=ended)


def _valid_key(name: str) -> str:
    """Replaces characters that MLflow refuses in the keys of images, which must be ASCII."""
    return re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", name)


def _valid_name(name: str) -> str:
    """Replaces parts that MLflow refuses in names: some characters, and paths that are not normalized, like `a//b`."""
    parts = re.sub(r"[^\w\-./ ]", "_", name).split("/")
    path = "/".join(part if part.strip(".") else "_" for part in parts)
    return re.sub(r"^\.\.", "__", path[-_NAME_CHARACTERS:].lstrip("/"))
