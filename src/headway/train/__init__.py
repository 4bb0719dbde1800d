"""Training: the loop and what surrounds it.

Start with `Pipeline`, then read loop.py, which is the whole loop. `Stage` and `TrainValStage` are what users subclass;
run_state.py, loop_state.py and train_val_state.py hold the loop's own state for these three. metrics/ reduces, records
and shows numbers; model/ places, wraps and updates models; resume/ saves and restores; diagnose/ explains what went
wrong.
"""

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.train.callback import Callback as Callback
    from headway.train.metrics.history import History as History
    from headway.train.model.initial_weights import empty_parameters as empty_parameters
    from headway.train.model.parallel import (
        Ddp as Ddp,
        Fsdp as Fsdp,
        Tp as Tp,
        count_parameters as count_parameters,
    )
    from headway.train.model.schedules import scale_lr as scale_lr, warmup_cosine as warmup_cosine
    from headway.train.pipeline import Pipeline as Pipeline
    from headway.train.resume.ledger_writer import Ledger as Ledger
    from headway.train.resume.rng import (
        random_state as random_state,
        restore_random_state as restore_random_state,
    )
    from headway.train.settings import TrainSettings as TrainSettings
    from headway.train.stage import Stage as Stage
    from headway.train.train_val import TrainValStage as TrainValStage

__getattr__, __dir__, __all__ = lazy.exports(__name__)
