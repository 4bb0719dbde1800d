"""Learn: the loop. Pipeline, stages, metrics, precision, parallelism.

`Pipeline` is the door; loop.py is the heart.
"""

from headway.train.callback import Callback
from headway.train.metrics.history import History
from headway.train.model.parallel import Ddp, Fsdp, Tp, count_parameters
from headway.train.model.schedules import scale_lr, warmup_cosine
from headway.train.pipeline import Pipeline
from headway.train.settings import TrainSettings
from headway.train.stage import Stage
from headway.train.train_val import TrainValStage

__all__ = [
    "Callback",
    "Ddp",
    "Fsdp",
    "History",
    "Pipeline",
    "Stage",
    "Tp",
    "TrainSettings",
    "TrainValStage",
    "count_parameters",
    "scale_lr",
    "warmup_cosine",
]
