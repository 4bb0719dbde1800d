"""Checkpoints: a checksum on every byte, an atomic commit, and nothing that can execute.

    path = checkpoint.save(run, {"net": net.state_dict(), "adamw": adamw.state_dict(), "epoch": 3}, step=1000)
    loaded = checkpoint.load_latest(run, {"net": net.state_dict(), "adamw": {}, "epoch": None})

`api` saves and loads; `settings` and `retention` determine when to save and what to keep. `format` is the format on
disk, `write` writes it, `inspect` displays it, and `weights` fills models from it and from files of other tools. Names
are loaded on first use: `verify` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.checkpoint.api import (
        LoadedCheckpoint as LoadedCheckpoint,
        find_valid as find_valid,
        load as load,
        load_best as load_best,
        load_latest as load_latest,
        save as save,
    )
    from headway.checkpoint.format.verification import verify as verify
    from headway.checkpoint.inspect.exporter import export as export, export_adapter as export_adapter
    from headway.checkpoint.retention import Retention as Retention, prune as prune
    from headway.checkpoint.weights.loading import WeightsReport as WeightsReport
    from headway.checkpoint.weights.source import Weights as Weights
    from headway.checkpoint.write.saver import Saver as Saver
    from headway.checkpoint.write.writer import SavedCheckpoint as SavedCheckpoint

__getattr__, __dir__, __all__ = lazy.exports(__name__)
