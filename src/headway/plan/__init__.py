"""Estimates memory, time and cost of a model and a layout before a run, without importing torch.

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
    from headway.plan.cost.economy import Workload as Workload
    from headway.plan.machine.calibration import Calibration as Calibration
    from headway.plan.machine.hardware import Device as Device, Node as Node
    from headway.plan.model.hugging_face import from_hf_config as from_hf_config
    from headway.plan.model.layout import Layout as Layout
    from headway.plan.model.presets import preset as preset
    from headway.plan.model.transformer import (
        Encoder as Encoder,
        Image as Image,
        Mla as Mla,
        Moe as Moe,
        StateSpace as StateSpace,
        Transformer as Transformer,
    )
    from headway.plan.report.estimates import Estimate as Estimate, estimate as estimate
    from headway.plan.report.quantity import Quantity as Quantity
    from headway.plan.searcher.layouts import SearchResult as SearchResult, search as search
    from headway.plan.tracer.measurement import measure as measure
    from headway.plan.tracer.request import trace as trace
    from headway.plan.tracer.settings import TraceSettings as TraceSettings

__getattr__, __dir__, __all__ = lazy.exports(__name__)
