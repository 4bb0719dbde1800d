"""Loads samples from storage to the device, in an order that is a pure function of (seed, epoch, position).

    loader = hw.data.DataLoader(dataset, batch_size=64, shuffle=True, seed=0)

`DataLoader` serves any map-style dataset, `ShardLoader` tar shards. Inside: order/ (which sample comes when), shards/
(the file format), catalog/ (datasets by name), sources/ (the datasets of a mix), samples/ (reads, transforms and
collates samples), cache/ (the node cache, staging), images/ (crops), arrays/ (chunks of large arrays, mixed batches),
feed/ (copies to the device), tools/ (checks and benchmarks). Public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.arrays import (
        ShardedXrDataset as ShardedXrDataset,
        chunk_and_shard_indices as chunk_and_shard_indices,
        interleave_batches as interleave_batches,
        interleave_dict_batches as interleave_dict_batches,
        shard_indices as shard_indices,
        sharded_xr_dataset as sharded_xr_dataset,
    )
    from headway.data.cache import NodeCache as NodeCache
    from headway.data.catalog import Catalog as Catalog, Dataset as Dataset, index as index
    from headway.data.dataset_split import split as split
    from headway.data.images import (
        Batch as Batch,
        BlockMasks as BlockMasks,
        CenterCrop as CenterCrop,
        CutMix as CutMix,
        ImageTransform as ImageTransform,
        Mixup as Mixup,
        MultiCrop as MultiCrop,
        RandAugment as RandAugment,
        RandomChoice as RandomChoice,
        RandomErasing as RandomErasing,
        RandomResizedCrop as RandomResizedCrop,
        TrivialAugment as TrivialAugment,
    )
    from headway.data.loader import DataLoader as DataLoader
    from headway.data.order import Order as Order, Shuffle as Shuffle
    from headway.data.shard_loader import ShardLoader as ShardLoader
    from headway.data.shards import (
        Shard as Shard,
        ShardLimits as ShardLimits,
        decode_rgb as decode_rgb,
        pack as pack,
    )
    from headway.data.sources import Mix as Mix
    from headway.data.tools import DaliSource as DaliSource

__getattr__, __dir__, __all__ = lazy.exports(__name__)
