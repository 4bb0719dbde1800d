"""The shard format: tar files in the WebDataset layout.

shard_file (reading bytes) -> tar (headers) -> entries (samples), indexes and checksums (files beside shards) -> shard
(reading samples) -> decode (bytes to values), packing (writing shards), file_tree and mds (directories and MDS datasets
as samples) and label_order (are they shuffled?).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.shards.decode import decode_rgb as decode_rgb
    from headway.data.shards.packing import pack as pack
    from headway.data.shards.shard import Shard as Shard
    from headway.data.shards.tar import ShardLimits as ShardLimits

__getattr__, __dir__, __all__ = lazy.exports(__name__)
