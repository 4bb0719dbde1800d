"""Keep: state that survives. A checkpoint that is what it says: checked bytes, one commit, nothing that executes.

    path = checkpoint.save(run, {"net": net.state_dict(), "adamw": adamw.state_dict(), "epoch": 3}, step=1000)
    loaded = checkpoint.load_latest(run, {"net": net.state_dict(), "adamw": {}, "epoch": None})

Looking at files (`verify`) needs no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.checkpoint.api import (
        Loaded as Loaded,
        find_valid as find_valid,
        load as load,
        load_latest as load_latest,
        save as save,
    )
    from headway.checkpoint.format.manifest import verify as verify
    from headway.checkpoint.inspect.exporter import export as export
    from headway.checkpoint.retention import Retention as Retention, prune as prune
    from headway.checkpoint.write.saver import Saved as Saved, Saver as Saver

__getattr__, __dir__, __all__ = lazy.exports(__name__)
