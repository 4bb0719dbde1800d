"""The datasets of a mix (mix), their open shards (open_shards), and what reads them: threads or processes (read_mode,
reader_pool, reader_process). A chunk holds the samples that were read together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.sources.mix import Mix as Mix
    from headway.data.sources.open_shards import (
        OpenShards as OpenShards,
        Source as Source,
        find_sources as find_sources,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
