"""The sink for TensorBoard: event files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from headway.record.media.index import MediaItem, read_histogram
from headway.record.sinks.base import MetricRow, RunStatus, Sink, require_package
from headway.record.sinks.rows import RestartDetector, scalars
from headway.run import Run
from headway.system import files


@final
@dataclass(kw_only=True)
class TensorBoard(Sink):
    """Writes event files for TensorBoard."""

    replaces_steps = True
    directory: str | Path | None = None
    """None: `tensorboard/` in the run directory"""
    max_queue: int = 10
    """events that wait to be written"""
    flush_secs: float = 120
    filename_suffix: str = ""

    def __post_init__(self) -> None:
        require_package("tensorboard", self)
        if self.directory is not None:
            self.directory = str(Path(self.directory).absolute())

    def open(self, run: Run) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._directory = run
        self._writer = EventFileWriter(
            str(self.directory or run.tensorboard_dir),
            max_queue_size=self.max_queue,
            flush_secs=self.flush_secs,
            filename_suffix=self.filename_suffix,
        )
        self._restarted = len(run.info()["attempts"]) > 1
        self._restarts = RestartDetector()

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self._write_row(row)
        self._writer.flush()  # the rows count as sent from then on

    def _begin_session(self, step: int) -> None:
        """Hides what was written from this step on, if an attempt begins here. Rows of earlier attempts, which those
        could not deliver, may come first."""
        if self._restarted:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=start))
            self._restarted = False

    def _write_row(self, row: MetricRow) -> None:
        if row["kind"] == "train":
            self._restarted |= self._restarts.observe(row)
            self._begin_session(row["step"])
        elif row["kind"] != "checkpoint":  # which may come late
            # it follows the log point of its step, and does not repeat it
            self._begin_session(row["step"] + 1)
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=row["time"], step=row["step"], summary=summary))

    def write_media(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            if self._restarted:  # an attempt may begin with a validation of the step at which it resumes
                attempt = self._directory.info()["attempts"][-1]
                self._begin_session(max(item.step, attempt.get("step_started", -1) + 1))
            value = media_value(item, item.path(self._directory))
            if value is not None:
                summary = self._summaries.Summary(value=[value])
                self._writer.add_event(
                    self._events.Event(wall_time=item.time, step=item.step, summary=summary)
                )
        self._writer.flush()

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  event files have no status
        self._writer.close()


def media_value(item: MediaItem, path: Path) -> Any:
    """Returns the value that `SummaryWriter.add_image`, `add_histogram` or `add_text` writes; None if it is damaged."""
    from tensorboard.compat.proto import summary_pb2 as summaries, tensor_pb2, tensor_shape_pb2
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    name = item.label
    if item.kind in ("image", "figure"):
        image = summaries.Summary.Image(
            height=item.height, width=item.width, colorspace=3, encoded_image_string=files.read_regular(path)
        )
        return summaries.Summary.Value(tag=name, image=image)
    if item.kind == "text":
        plugin = summaries.SummaryMetadata.PluginData(
            plugin_name="text", content=TextPluginData(version=0).SerializeToString()
        )
        one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(
            dtype="DT_STRING", string_val=[files.read_regular(path)], tensor_shape=one
        )
        metadata = summaries.SummaryMetadata(plugin_data=plugin)
        return summaries.Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
    histogram = read_histogram(path)
    if histogram is None:
        return None
    edges, counts = histogram["edges"], histogram["counts"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    weighted = [(middle, count) for middle, count in zip(middles, counts, strict=True)]
    proto = summaries.HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(middle * count for middle, count in weighted),  # of the middles of the bins
        sum_squares=sum(middle**2 * count for middle, count in weighted),
        bucket_limit=edges[1:],
        bucket=counts,
    )
    return summaries.Summary.Value(tag=name, histo=proto)
