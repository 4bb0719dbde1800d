"""The methods of `Pipeline` that add sinks for metrics and media, and set how media are kept."""

from __future__ import annotations

from abc import ABC
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from headway.record.media.content import ImageFormat
from headway.record.media.writer import MediaSettings
from headway.record.sinks import Mlflow, Sink, TensorBoard, Wandb, check_sink
from headway.record.sinks.options import MlflowOptions, TensorBoardOptions, WandbOptions, check_options

if TYPE_CHECKING:
    from headway.train.run_state import RunState


class TrackerMethods(ABC):
    """The sinks and the media of a pipeline; the run directory has metrics and media in any case."""

    _state: RunState

    def enable_wandb(self, **options: Unpack[WandbOptions]) -> None:
        """Sends metrics and media to Weights & Biases, in a process that never delays training.

        Takes the arguments of `wandb.init` that make sense here: `project`, `entity`, `name`, `notes`, `group`,
        `job_type`, `tags`, `mode`, `save_code`, `settings`; also `artifacts`, files of the run directory to upload, and
        `shared=True`, with which all ranks write to one run: see `headway.record.sinks.Wandb`.

        >>> pipe.enable_wandb(project="digits", job_type="train", notes="a larger crop", tags=["baseline"])
        """
        self.add_sink(Wandb(**check_options(WandbOptions, Wandb.title, options)))

    def enable_tensorboard(
        self, directory: str | Path | None = None, **options: Unpack[TensorBoardOptions]
    ) -> None:
        """Writes event files for TensorBoard, by default into `tensorboard/` in the run directory.

        Takes `max_queue`, `flush_secs` and `filename_suffix` of `SummaryWriter`.

        >>> pipe.enable_tensorboard("tensorboard/digits")
        """
        settings = check_options(TensorBoardOptions, TensorBoard.title, options)
        self.add_sink(TensorBoard(directory=directory, **settings))

    def enable_mlflow(self, **options: Unpack[MlflowOptions]) -> None:
        """Sends metrics and media to MLflow, in a process that never delays training.

        Takes `tracking_uri`, `experiment`, `name`, `notes`, `tags` (a dict), `artifact_location` (for a new experiment)
        and `artifacts`: see `headway.record.sinks.Mlflow`.

        >>> pipe.enable_mlflow(tracking_uri="sqlite:////data/mlflow.db", experiment="digits")
        """
        self.add_sink(Mlflow(**check_options(MlflowOptions, Mlflow.title, options)))

    def add_sink(self, sink: Sink) -> None:
        """Sends metrics to a sink, such as `sinks.Csv`, from the metrics file in a process that never delays training.

        >>> pipe.add_sink(SqliteSink(file="metrics.db"))
        """
        check_sink(sink, self._state.sinks)
        self._state.sinks.append(sink)

    def set_media(
        self,
        *,
        max_gb: float = 1.0,
        format: ImageFormat = "png",
        ranks: tuple[int, ...] | Literal["all"] = (0,),
    ) -> None:
        """Sets how the items of `log_image`, `log_figure`, `log_histogram` and `log_text` are kept.

        `max_gb` is the size of all files together, in units of 1e9 bytes: when it is reached, some of the older items
        of the names that take the most space are removed. `format` is "png" or "jpeg". Only `ranks` keep their items.

        >>> pipe.set_media(max_gb=5, format="jpeg")
        """
        self._state.media_settings = MediaSettings(max_gb=max_gb, format=format, ranks=ranks)
