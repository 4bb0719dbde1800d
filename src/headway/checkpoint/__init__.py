"""Keep: state that survives. A checkpoint that is what it says: checked bytes, one commit, nothing that executes.

    path = checkpoint.save(run, {"net": net.state_dict(), "adamw": adamw.state_dict(), "epoch": 3}, step=1000)
    loaded = checkpoint.load_latest(run, {"net": net.state_dict(), "adamw": {}, "epoch": None})

Looking at files (`verify`) needs no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.checkpoint.exporting import export as export
    from headway.checkpoint.keeping import (
        Loaded as Loaded,
        find_valid as find_valid,
        load as load,
        load_latest as load_latest,
        save as save,
    )
    from headway.checkpoint.layout import verify as verify
    from headway.checkpoint.retention import Retention as Retention, prune as prune

# public name -> the module it comes from
_HOME = {
    "Loaded": "keeping",
    "Retention": "retention",
    "export": "exporting",
    "find_valid": "keeping",
    "load": "keeping",
    "load_latest": "keeping",
    "prune": "retention",
    "save": "keeping",
    "verify": "layout",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'headway.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"headway.checkpoint.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
