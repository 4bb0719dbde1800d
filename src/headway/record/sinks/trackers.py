"""The trackers themselves. Each speaks to its package in the way the package wants; runs in a process of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, final

import yaml

from headway.record.sinks.rows import safe, scalars
from headway.run import Run
from headway.run.plain import leaves


class Tracker(ABC):
    """Takes rows, and in the end how the run went: "done", "failed", "stopped" or "interrupted"."""

    @abstractmethod
    def log(self, row: dict[str, Any]) -> None: ...

    @abstractmethod
    def close(self, status: str, exit_code: int) -> None: ...


@final
class WandbTracker(Tracker):
    """`step` is logged as a value of its own: W&B drops rows whose own step goes back, as it does after a restart."""

    def __init__(self, run: Run, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            id=run.id,
            name=run.id,
            resume="allow",
            dir=run.path,
            config=_config(run),
            settings=wandb.Settings(console="off"),
            **settings,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, Any]) -> None:
        self._run.log({**scalars(row), "step": row["step"], "epoch": row.get("epoch")})

    def close(self, status: str, exit_code: int) -> None:
        if status == "stopped":
            self._run.mark_preempting()  # it will be resumed
        self._run.finish(exit_code=exit_code)


@final
class TensorBoardTracker(Tracker):
    """Events as tensorboard's own writer makes them; torch is not needed for that."""

    def __init__(self, run: Run, settings: dict[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(settings["folder"] or str(run.tensorboard_dir))
        self._restarted = len(run.info()["attempts"]) > 1

    def log(self, row: dict[str, Any]) -> None:
        if self._restarted:  # what an earlier attempt wrote beyond this step is no longer true
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(
                self._events.Event(wall_time=time.time(), step=row["step"], session_log=start)
            )
            self._restarted = False
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=row["time"], step=row["step"], summary=summary))

    def close(self, status: str, exit_code: int) -> None:  # noqa: ARG002 - event files know no status
        self._writer.close()


@final
class MlflowTracker(Tracker):
    def __init__(self, run: Run, settings: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings["tracking_uri"])
        name = settings["experiment"] or run.name
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        known = self._client.search_runs([where], filter_string=f"tags.`headway.run` = '{run.id}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(where, tags={"headway.run": run.id}, run_name=run.id)
        self._id = made.info.run_id
        for name, value in leaves(_config(run)):
            self._client.log_param(self._id, safe(name), str(value)[:500])

    def log(self, row: dict[str, Any]) -> None:
        when = round(row["time"] * 1000)
        metrics = [self._metric(safe(name), value, when, row["step"]) for name, value in scalars(row).items()]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: str, exit_code: int) -> None:  # noqa: ARG002 - the status says it
        ended = {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, status=ended)


TRACKERS: dict[str, type[WandbTracker | TensorBoardTracker | MlflowTracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
}


def _config(run: Run) -> dict[str, Any]:
    """The run's settings, without secrets, as they are in its directory."""
    config = yaml.safe_load(run.config_file.read_text())
    return config if isinstance(config, dict) else {}
