"""Datasets by name: catalog (the directory tree), shard_files (which files are the shards), stubs (for editors)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.catalog.catalog import Catalog as Catalog, Dataset as Dataset
    from headway.data.catalog.shard_files import (
        count_shards as count_shards,
        find_shards as find_shards,
        index as index,
        is_pattern as is_pattern,
        warn_of_unfinished as warn_of_unfinished,
        write_indexes as write_indexes,
    )
    from headway.data.catalog.stubs import write_stubs as write_stubs

__getattr__, __dir__, __all__ = lazy.exports(__name__)
