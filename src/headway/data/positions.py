"""Where a loader is, in small files: for training loops that keep no other checkpoint of headway's.

    step = hw.data.load_position(loader, "positions")       # 0 if nothing was saved yet
    for batch in loader:
        step += 1
        ...
        if step % 1000 == 0:
            hw.data.save_position(loader, "positions", step)

A file is whole or not there, and has a checksum. The newest good one counts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headway import dist
from headway.dist import collective
from headway.errors import NoValidCheckpoint, UsageError
from headway.system.files import storage, write_atomic

T = TypeVar("T")


class Loader(Protocol):
    """What has a position: `DataLoader` and `ShardLoader`."""

    @property
    def per_rank(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def save_position(loader: Loader, folder: str | Path, step: int, *, keep: int = 3) -> None:
    """Saves where a loader is as `FOLDER/step-000000001000.json`, and keeps the last `keep` of these files.

    `step` counts over the whole run, not within an epoch: one below the newest there is refused. Call it on all
    ranks; rank 0 writes for all, unless each has a state of its own (`rank-00000/step-...`).
    """
    state, path = loader.state_dict(), _folder(loader, folder) / f"step-{step:012d}.json"
    _once(loader, lambda: _save(state, path, keep))


def load_position(loader: Loader, folder: str | Path) -> int:
    """Puts a loader where the newest good file says, and returns its step; 0 if there is no file. On all ranks."""
    newest = _once(loader, lambda: _newest(_folder(loader, folder)))
    if newest is None:
        return 0
    step, state = newest
    loader.load_state_dict(state)
    return int(step)


def _folder(loader: Loader, folder: str | Path) -> Path:
    rank = dist.rank() if dist.is_initialized() else 0
    return Path(folder) / f"rank-{rank:05d}" if loader.per_rank else Path(folder)


def _once(loader: Loader, work: Callable[[], T]) -> T:
    """On rank 0 for all ranks, which learn what came of it; by each rank if each has a state of its own."""
    return work() if loader.per_rank or not dist.is_initialized() else collective.from_root(work)


def _save(state: dict[str, Any], path: Path, keep: int) -> None:
    with storage(f"list {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        known = sorted(path.parent.glob("step-*.json"))
    if keep < 1:
        raise UsageError(f"keep={keep}: keep at least 1 position")
    if known and known[-1].name > path.name:
        raise UsageError(
            f"{path.parent} has {known[-1].name} already, which is after {path.name}: count steps over the whole "
            "run, or choose another folder for another run"
        )
    text = json.dumps(state)
    with storage(f"write {path}"):
        write_atomic(path, json.dumps({"crc32": zlib.crc32(text.encode()), "state": text}).encode())
        for old in [*(other for other in known if other != path), path][:-keep]:
            old.unlink(missing_ok=True)


def _newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    paths = sorted(folder.glob("step-*.json"), reverse=True)
    for path in paths:
        state = _state(path)
        if state is not None:
            return int(path.stem.removeprefix("step-")), state
    if paths:
        raise NoValidCheckpoint(
            f"{len(paths)} positions in {folder}, but none of them is whole: restore one, or remove them to start over"
        )
    return None


def _state(path: Path) -> dict[str, Any] | None:
    """The state in a file; None if it is damaged."""
    with storage(f"read {path}"):
        raw = path.read_bytes()
    try:
        kept = json.loads(raw)
        text = str(kept["state"])
        return dict(json.loads(text)) if zlib.crc32(text.encode()) == kept["crc32"] else None
    except (ValueError, KeyError, TypeError):
        return None
