"""Tools for datasets: check shards, find duplicate keys, measure loading speed, feed DALI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.tools.benchmark import Benchmark as Benchmark, run_benchmark as run_benchmark
    from headway.data.tools.dali import DaliSource as DaliSource
    from headway.data.tools.duplicate_keys import find_duplicates as find_duplicates
    from headway.data.tools.shard_check import (
        check_label_order as check_label_order,
        check_shard as check_shard,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
