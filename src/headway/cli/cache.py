"""`headway cache`: lists the node cache, and removes shards of killed jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.cli.parser import dispatch, parse, require_path
from headway.cli.screen import console, plain_table, print_json, safe
from headway.errors import DONE
from headway.system.text import format_bytes, plural

_USAGE = """\
usage: headway cache ls | sweep [--path /dev/shm]

  headway cache ls          the shards that your jobs keep on this node, and which of them are in use
  headway cache sweep       remove the shards of killed jobs; all shards, if no job of yours uses the cache now

The last process that uses the cache removes it; sweep is for processes that were killed, and safe at any time.
Administrators can call it in the epilog of a cluster, as the user of the job.
"""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The node cache of this user on this node."""

    path: Path = Path("/dev/shm")
    """where the cache is, as given to NodeCache(path=...)"""
    json: bool = False
    """print JSON"""


def main(argv: list[str]) -> int:
    return dispatch("cache", {"ls": _ls, "sweep": _sweep}, _USAGE, argv)


def _ls(argv: list[str]) -> int:
    from headway.data.cache.node_cache import NodeCache

    options = parse(CacheOptions, argv, verb="cache ls")
    if options.path != CacheOptions.path:  # the default need not exist
        require_path(options.path, "directory")
    found = NodeCache(path=options.path).ls()
    if options.json:
        print_json([entry._asdict() for entry in found])
        return DONE
    table = plain_table("shard", "bytes", "", numbers=("bytes",))
    for entry in sorted(found, key=lambda entry: entry.source or ""):
        state = "in use" if entry.in_use else "" if entry.source else "left behind"
        table.add_row(safe(entry.source or "(being copied)"), format_bytes(entry.bytes), state)
    total = sum(entry.bytes for entry in found)
    table.add_row(
        f"{plural(len(found), 'shard')} under {safe(str(options.path))}",
        format_bytes(total),
        "",
        style="bold",
    )
    console().print(table)
    return DONE


def _sweep(argv: list[str]) -> int:
    from headway.data.cache.node_cache import NodeCache

    options = parse(CacheOptions, argv, verb="cache sweep")
    cache = NodeCache(path=options.path)
    removed, left = cache.sweep(), cache.ls()
    if options.json:
        print_json({"removed_bytes": removed, "left_bytes": sum(entry.bytes for entry in left)})
        return DONE
    kept = f"; {format_bytes(sum(entry.bytes for entry in left))} are in use by a job" if left else ""
    print(f"removed {format_bytes(removed)}{kept}")
    return DONE
