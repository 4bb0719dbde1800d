"""The sink for MLflow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headway.record.sinks.base import MetricRow, RunStatus, Sink, require_package, run_config
from headway.record.sinks.rows import scalars
from headway.run import Run
from headway.run.plain import leaves


@final
@dataclass(kw_only=True)
class Mlflow(Sink):
    """Feeds an MLflow server or store; a resumed run finds its run there by the tag `headway.run`."""

    title = "MLflow"
    tracking_uri: str | None = None
    """None: what MLFLOW_TRACKING_URI says"""
    experiment: str | None = None
    """None: the name of the run"""

    def __post_init__(self) -> None:
        require_package("mlflow", self)

    def open(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        name = self.experiment or run.name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        known = self._client.search_runs([experiment_id], filter_string=f"tags.`headway.run` = '{run.id}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment_id, tags={"headway.run": run.id}, run_name=run.id)
        self._id = made.info.run_id
        for setting, value in leaves(run_config(run)):
            self._client.log_param(self._id, _valid_name(setting), str(value)[:500])

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            milliseconds = round(row["time"] * 1000)
            metrics = [
                self._metric(_valid_name(name), value, milliseconds, row["step"])
                for name, value in scalars(row).items()
            ]
            if metrics:
                self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  MLflow has no exit codes
        ended = {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, status=ended)


def _valid_name(name: str) -> str:
    """Replaces the characters that MLflow refuses in names."""
    return re.sub(r"[^\w\-./ ]", "_", name)
