"""Training: the loop and what surrounds it.

Start with `Pipeline`, then read loop.py, which is the whole loop. `Stage` and `TrainValStage` are what users subclass;
loop_state.py and train_val_state.py hold what the loop knows about them. metrics/ reduces, records and shows numbers;
model/ places and wraps models; resume/ saves and restores; diagnose/ explains what went wrong.
"""

from headway.train.callback import Callback
from headway.train.metrics.history import History
from headway.train.model.initial_weights import empty_parameters
from headway.train.model.parallel import Ddp, Fsdp, Tp, count_parameters
from headway.train.model.schedules import scale_lr, warmup_cosine
from headway.train.pipeline import Pipeline
from headway.train.resume.ledger_writer import Ledger
from headway.train.resume.rng import random_state, restore_random_state
from headway.train.settings import TrainSettings
from headway.train.stage import Stage
from headway.train.train_val import TrainValStage

__all__ = [
    "Callback",
    "Ddp",
    "Fsdp",
    "History",
    "Ledger",
    "Pipeline",
    "Stage",
    "Tp",
    "TrainSettings",
    "TrainValStage",
    "count_parameters",
    "empty_parameters",
    "random_state",
    "restore_random_state",
    "scale_lr",
    "warmup_cosine",
]
