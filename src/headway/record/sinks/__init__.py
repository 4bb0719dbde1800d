"""Trackers: Weights & Biases, TensorBoard and MLflow, fed from the metrics file by a process of their own.

Training writes rows into `metrics/rank-00000.jsonl` and knows of nothing else. Each tracker has a process that reads
them there, so a tracker that hangs, dies or has no network costs training nothing: its rows wait in the file.

    with feeding(run, [Wandb(project="digits"), TensorBoard()]):
        train()
"""

from headway.record.sinks.feeder import feeding
from headway.record.sinks.settings import Mlflow, Sink, TensorBoard, Wandb

__all__ = ["Mlflow", "Sink", "TensorBoard", "Wandb", "feeding"]
