"""Any `nn.Module`: `trace` estimates it without a GPU, `measure` compares the estimate with real steps, `calibrate`
measures the machine. The sub-packages `process` and `probe` are the processes in which user code runs; only they
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.tracer.measurement import (
        Measurement as Measurement,
        calibrate as calibrate,
        measure as measure,
        measure_module as measure_module,
    )
    from headway.plan.tracer.measurement_table import print_measurement as print_measurement
    from headway.plan.tracer.request import estimate_trace as estimate_trace, trace as trace
    from headway.plan.tracer.result import TraceResult as TraceResult
    from headway.plan.tracer.settings import TraceSettings as TraceSettings

__getattr__, __dir__, __all__ = lazy.exports(__name__)
