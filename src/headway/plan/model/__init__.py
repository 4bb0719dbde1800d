"""What is trained, and how it is distributed: `Transformer` with its exact parameter counts, well-known models as
presets, models read from a Hugging Face config.json, and `Layout`, the degrees of parallelism with batch and
precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.model.hugging_face import from_hf_config as from_hf_config
    from headway.plan.model.layout import Layout as Layout
    from headway.plan.model.presets import preset as preset, preset_names as preset_names
    from headway.plan.model.transformer import (
        Encoder as Encoder,
        Image as Image,
        Mla as Mla,
        Moe as Moe,
        StateSpace as StateSpace,
        Transformer as Transformer,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
