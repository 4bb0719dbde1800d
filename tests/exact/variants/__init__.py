"""The table: each variant of a small training by its name, `class/what differs`."""

from __future__ import annotations

from variants import hooks, loaders, models, optimizers, python_state, schedulers
from variants.base import Variant

_TABLES = (optimizers, schedulers, hooks, models, loaders, python_state)

VARIANTS: dict[str, Variant] = {
    f"{table.__name__.rpartition('.')[2]}/{name}": variant
    for table in _TABLES
    for name, variant in table.VARIANTS.items()
}

ALL = VARIANTS | {"silent": python_state.SILENT}
"""what `trial.py` trains: the table, and what it must not have"""
