"""The order of samples: a pure function of seed, epoch and position.

permutation (keyed hashes and bijections) -> order (one dataset), timeline (the proportions of several) and mix_order
(the orders of several) -> lookup (which samples lie at which positions) -> batch_split (a batch between ranks) and
batching (passes and batches).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.order.lookup import SampleLookup as SampleLookup, TraceableLoader as TraceableLoader
    from headway.data.order.order import Order as Order, Shuffle as Shuffle

__getattr__, __dir__, __all__ = lazy.exports(__name__)
