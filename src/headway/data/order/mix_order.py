"""The orders of all datasets of a mix, by number, and checks of a saved position against them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import final

from headway.data.order.order import Order, Shuffle
from headway.data.order.permutation import derive_key
from headway.errors import UsageError


@final
class MixOrder:
    """The orders of the datasets of a mix. Each depends on the name of its dataset, not on the other datasets."""

    def __init__(self, counts: Mapping[str, Sequence[int]], settings: Shuffle, *, shuffle: bool) -> None:
        self.names = sorted(counts)
        self.keys = [_name_key(name) for name in self.names]
        """the part of each random number's key that identifies the dataset"""
        self.shuffles = [replace(settings, seed=derive_key(settings.seed, key)) for key in self.keys]
        self.orders = [
            Order(counts[name], own if shuffle else None)
            for name, own in zip(self.names, self.shuffles, strict=True)
        ]


def _name_key(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def datasets_changed(
    saved: Collection[str], here: Collection[str], added: Collection[str], removed: Collection[str]
) -> bool:
    """Whether a mix has other datasets than when its position was saved; refuses a change that was not stated."""
    new, gone = sorted({*here} - {*saved}), sorted({*saved} - {*here})
    unstated = [] if {*new} <= {*added} else [f"added={new}"]
    unstated += [] if {*gone} <= {*removed} else [f"removed={gone}"]
    if unstated:
        raise UsageError(
            f"the position belongs to a mix of the datasets {sorted(saved)}, and this one has {sorted(here)}: if that "
            f"is intended, use Mix(..., {', '.join(unstated)})"
        )
    return bool(new or gone)
