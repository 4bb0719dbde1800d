"""Large arrays in chunks per rank (chunks), and samples mixed among neighboring batches (interleave)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.arrays.chunks import (
        ShardedXrDataset as ShardedXrDataset,
        chunk_and_shard_indices as chunk_and_shard_indices,
        shard_indices as shard_indices,
        sharded_xr_dataset as sharded_xr_dataset,
    )
    from headway.data.arrays.interleave import (
        interleave_batches as interleave_batches,
        interleave_dict_batches as interleave_dict_batches,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
