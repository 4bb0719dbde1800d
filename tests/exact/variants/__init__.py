"""The table: each variant of a small training by its name, `class/what differs`."""

from __future__ import annotations

import re

from variants import hooks, loaders, models, optimizers, python_state, schedulers
from variants.base import Variant

_TABLES = (optimizers, schedulers, hooks, models, loaders, python_state)

_LATER = re.compile(
    r"hooks/(pre-stage-(resets|lowers|zeroes|adds).*|pre-epoch-(scales|draws|multiplies|adds).*|(post-epoch|step)-adds.*"
    r"|post-epoch-unfreezes|second-stage-(killed|freezes|lowers).*|callback-pre-.*|own-loop-hooks)"
    r"|models/(masked|buffer-(grows|lazy|none|quantized|sparse))|optimizers/state-sparse|loaders/torch-persistent-workers"
)

VARIANTS: dict[str, Variant] = {
    f"{table.__name__.rpartition('.')[2]}/{name}": variant
    for table in _TABLES
    for name, variant in table.VARIANTS.items()
    if not _LATER.fullmatch(f"{table.__name__.rpartition('.')[2]}/{name}")
}

ALL = VARIANTS | {"silent": python_state.SILENT}
"""what `trial.py` trains: the table, and what it must not have"""
