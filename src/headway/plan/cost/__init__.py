"""What it costs, as formulas: model states and activations add up to memory, rooflines and collectives to the time of
a step with its pipeline schedule, and `economy` has checkpoints, failures and energy of a run. Nothing here prints or
reads files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.cost.economy import Workload as Workload
    from headway.plan.cost.memory import (
        RankMemory as RankMemory,
        peak as peak,
        rank_memory as rank_memory,
        reserved_bytes as reserved_bytes,
    )
    from headway.plan.cost.steptime import StepTime as StepTime, step_time as step_time

__getattr__, __dir__, __all__ = lazy.exports(__name__)
