"""The node cache (one copy of each shard per node, for all processes), and staging to a node's own disk.

node_cache (what loaders use) and prefetch (the thread that copies before a shard is needed) -> copier -> directory
(the files and their locks) and budget (how many bytes). staging uses the same copier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.cache.node_cache import NodeCache as NodeCache

__getattr__, __dir__, __all__ = lazy.exports(__name__)
