"""Before: what will a run cost? Model and layout in, memory, time and money out. No torch at import.

import headway as hw

model = hw.plan.preset("llama-3.1-8b")
layout = hw.plan.Layout(dp=8, zero=3, microbatch=2, global_batch=16, sequence=8192, precision="amp")
plan = hw.plan.estimate(model, layout, hw.plan.Node("h200-sxm8"))
print(plan.verdict, plan.answers["time.step"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.calibration import Calibration as Calibration
    from headway.plan.economy import Job as Job
    from headway.plan.estimating import Estimate as Estimate, estimate as estimate
    from headway.plan.hardware import Device as Device, Node as Node
    from headway.plan.hf import from_hf_config as from_hf_config
    from headway.plan.layout import Layout as Layout
    from headway.plan.measuring import measure as measure
    from headway.plan.presets import preset as preset
    from headway.plan.quantity import Quantity as Quantity
    from headway.plan.searching import Search as Search, search as search
    from headway.plan.tracing import Trace as Trace, trace as trace
    from headway.plan.transformer import Image as Image, Mla as Mla, Moe as Moe, Transformer as Transformer

# public name -> the module it comes from; loaded when first used
_HOME = {
    "Calibration": "headway.plan.calibration",
    "Device": "headway.plan.hardware",
    "Estimate": "headway.plan.estimating",
    "Image": "headway.plan.transformer",
    "Job": "headway.plan.economy",
    "Layout": "headway.plan.layout",
    "Mla": "headway.plan.transformer",
    "Moe": "headway.plan.transformer",
    "Node": "headway.plan.hardware",
    "Quantity": "headway.plan.quantity",
    "Search": "headway.plan.searching",
    "Trace": "headway.plan.tracing",
    "Transformer": "headway.plan.transformer",
    "estimate": "headway.plan.estimating",
    "from_hf_config": "headway.plan.hf",
    "measure": "headway.plan.measuring",
    "preset": "headway.plan.presets",
    "search": "headway.plan.searching",
    "trace": "headway.plan.tracing",
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy.names(__name__, _HOME)
