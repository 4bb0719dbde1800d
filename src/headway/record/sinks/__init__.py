"""Sinks send a run's metric rows to other systems: Weights & Biases, TensorBoard, MLflow, a CSV file, or your own.

Training writes rows to `metrics/rank-00000.jsonl` and waits for nothing else. Each sink runs in its own process, which
follows this file, so a sink that hangs, fails or has no network does not affect training: its rows stay in the file.

    with feeding(run, [Wandb(project="digits"), TensorBoard()]):
        train()

`Sink` in `base` is the interface, `transport` sends a sink to its process, `feeder` starts and ends that process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.record.sinks.base import MetricRow as MetricRow, RunStatus as RunStatus, Sink as Sink
    from headway.record.sinks.csv import Csv as Csv
    from headway.record.sinks.feeder import check_sink as check_sink, feeding as feeding
    from headway.record.sinks.mlflow import Mlflow as Mlflow
    from headway.record.sinks.replayer import replay as replay
    from headway.record.sinks.rows import scalars as scalars
    from headway.record.sinks.tensorboard import TensorBoard as TensorBoard
    from headway.record.sinks.wandb import Wandb as Wandb

__getattr__, __dir__, __all__ = lazy.exports(__name__)
