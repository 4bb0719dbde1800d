"""Feed: samples from storage to the device, in an order that is a pure function of (seed, epoch, position).

    loader = hw.data.DataLoader(dataset, batch_size=64, shuffle=True, seed=0)

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.arrays import (
        ShardedXrDataset as ShardedXrDataset,
        chunk_and_shard_indices as chunk_and_shard_indices,
        shard_indices as shard_indices,
        sharded_xr_dataset as sharded_xr_dataset,
    )
    from headway.data.batches import (
        interleave_batches as interleave_batches,
        interleave_dict_batches as interleave_dict_batches,
    )
    from headway.data.cache import NodeCache as NodeCache
    from headway.data.catalog import Catalog as Catalog, Dataset as Dataset
    from headway.data.finding import index as index
    from headway.data.loader import DataLoader as DataLoader
    from headway.data.mix import Mix as Mix
    from headway.data.order import Order as Order, Shuffle as Shuffle
    from headway.data.packing import pack as pack
    from headway.data.positions import load_position as load_position, save_position as save_position
    from headway.data.shardloader import ShardLoader as ShardLoader
    from headway.data.shards import Limits as Limits, Shard as Shard

_HOME = {
    "Catalog": "headway.data.catalog",
    "DataLoader": "headway.data.loader",
    "Dataset": "headway.data.catalog",
    "Limits": "headway.data.shards",
    "Mix": "headway.data.mix",
    "NodeCache": "headway.data.cache",
    "Order": "headway.data.order",
    "Shard": "headway.data.shards",
    "ShardLoader": "headway.data.shardloader",
    "ShardedXrDataset": "headway.data.arrays",
    "Shuffle": "headway.data.order",
    "chunk_and_shard_indices": "headway.data.arrays",
    "index": "headway.data.finding",
    "interleave_batches": "headway.data.batches",
    "interleave_dict_batches": "headway.data.batches",
    "load_position": "headway.data.positions",
    "pack": "headway.data.packing",
    "save_position": "headway.data.positions",
    "shard_indices": "headway.data.arrays",
    "sharded_xr_dataset": "headway.data.arrays",
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy.names(__name__, _HOME)
