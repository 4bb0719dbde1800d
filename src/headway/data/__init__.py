"""Feed: samples from storage to the device, in an order that is a pure function of (seed, epoch, position).

    loader = hw.data.DataLoader(dataset, batch_size=64, shuffle=True, seed=0)

Names are loaded when they are first used.
"""

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
    from headway.data.cache.node_cache import NodeCache as NodeCache
    from headway.data.catalog.catalog import Catalog as Catalog, Dataset as Dataset
    from headway.data.catalog.find import index as index
    from headway.data.loader import DataLoader as DataLoader
    from headway.data.order.mix import Mix as Mix
    from headway.data.order.order import Order as Order, Shuffle as Shuffle
    from headway.data.positions import load_position as load_position, save_position as save_position
    from headway.data.shard_loader import ShardLoader as ShardLoader
    from headway.data.shards.packing import pack as pack
    from headway.data.shards.shard import Limits as Limits, Shard as Shard

__getattr__, __dir__, __all__ = lazy.exports(__name__)
