"""`save`, `load`, `load_latest`, `load_best` and `find_valid`, on one rank or on many."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from headway.checkpoint.format import dtypes, tree
from headway.checkpoint.format.directory import (
    CheckpointDirectory,
    CheckpointRoot,
    DamagedCheckpoint,
    MovedCheckpoint,
    has_checkpoints,
    list_steps,
    resolve_root,
    step_dir,
)
from headway.checkpoint.format.manifest import STATE, Manifest, read_document, read_index, read_manifest
from headway.checkpoint.format.verification import check, read_save
from headway.checkpoint.inspect.listing import find_best
from headway.checkpoint.reader import CheckpointReader
from headway.checkpoint.write import disk
from headway.checkpoint.write.saver import Saver
from headway.dist.collective.exchange import RankExchange, rank_and_size
from headway.errors import NoValidCheckpoint, RunLocked, StorageError, UsageError
from headway.run import Run, has_info
from headway.run.lock import RunLock, check_free
from headway.run.paths import RunPaths
from headway.run.rebuild import corrupt_path
from headway.system import files
from headway.system.failpoints import failpoint

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOOK_PAUSES_S = (0.0, 0.1, 1.0, 10.0)
"""waits before the checks of a checkpoint that changes while the ranks read it; another host may see changes late"""

_REPLACED = "a later save has replaced it"

_Destinations = Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] | None
"""the state to load into, or a function that takes the path of the checkpoint and returns it"""


@final
@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The contents of a checkpoint: the state, and the `local` value that this rank saved (None if there is none).

    loaded = hw.checkpoint.load("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")
    print(loaded.step, loaded.state["epoch"], loaded.path)
    """

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]
    local: Any
    metrics: Mapping[str, float]
    save: str
    """the name of the save, which another save of the same step does not have"""


def save(
    where: CheckpointRoot,
    state: Mapping[str, Any],
    *,
    step: int,
    local: object = None,
    metrics: Mapping[str, float] | None = None,
    lock: RunLock | None = None,
) -> Path:
    """Saves a state as one checkpoint. When it returns, on every rank, the checkpoint is complete and on disk.

    `state` is a dict of named parts: state dicts of models and optimizers (plain tensors, or the DTensors of FSDP2 and
    tensor parallelism), and plain values. All ranks call it, with the same values except for the shards of tensors.
    `local` is JSON that only this rank has, such as the state of its random number generators. `metrics` are numbers by
    which the best checkpoint is chosen. `lock` is the run's lock, on rank 0: the save fails if another process took
    over the run.

    If any rank fails, all raise, and nothing is left: `StorageError` for a full or broken disk, `UsageError` for a
    value that a checkpoint cannot hold.

    >>> save(run, {"net": net.state_dict(), "sgd": sgd.state_dict(), "epoch": 3}, step=1000)  # doctest: +SKIP
    """
    saver = Saver(where, lock=lock, background=False, read_back=False)  # each save would be the first
    saver.save(state, step=step, local=local, metrics=metrics)
    return saver.finished()[0].path


def load(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] | None = None,
) -> LoadedCheckpoint:
    """Loads one checkpoint, on any number of ranks, after checking every byte of it.

    `state` names the parts to load, or is a function as in `load_latest`; None means all. Its tensors are filled in
    place, each rank reading its own shards; tensors that only the checkpoint has are created on the CPU.
    `NoValidCheckpoint` if the checkpoint is damaged, `UsageError` if there is none or it does not fit the state, which
    is then unchanged.

    >>> epoch = load(path, {"net": net.state_dict(), "epoch": None}).state["epoch"]  # doctest: +SKIP
    """
    path = Path(directory).absolute()
    exchange = RankExchange(f"read {path}")
    while exchange.from_root(path.is_dir):
        save, problems = verify_on_all_ranks(exchange, path)
        if not problems:
            loaded = _load(path, save, state)
            if loaded is not None:
                return loaded
        elif exchange.from_root(path.is_dir):
            raise NoValidCheckpoint(f"{path} is damaged: {'; '.join(problems[:5])}. Take another checkpoint")
    raise UsageError(
        f"there is no checkpoint at {path}; list those of a run with: headway checkpoint show RUN"
    )


def load_parts(loaded: LoadedCheckpoint, state: _Destinations) -> LoadedCheckpoint:
    """Loads further parts of a checkpoint that was loaded, and so verified, a moment ago. See `load`."""
    parts = _load(loaded.path, loaded.save, state)
    if parts is None:
        raise StorageError(f"{loaded.path} was replaced by a later save while it was being loaded: try again")
    return parts


def load_latest(
    where: CheckpointRoot, state: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] | None = None
) -> LoadedCheckpoint | None:
    """Loads the newest valid checkpoint of a run; None if there never was one. See `load` and `find_valid`.

    `state` may be a function that takes the path of the checkpoint and returns the state.

        loaded = hw.checkpoint.load_latest("checkpoints", {"net": net.state_dict()})
        step = loaded.step if loaded else 0                     # net was filled in place
    """
    while (found := _find_valid(where)) is not None:
        path, save = found
        loaded = _load(path, save, state)
        if loaded is not None:
            return loaded
    return None


def load_best(
    where: CheckpointRoot, state: Mapping[str, Any] | None = None, *, metric: str | None = None
) -> LoadedCheckpoint:
    """Loads the best checkpoint of a run, by the metric of its `keep_best`. See `load`.

    `metric` selects another metric: "val/loss" for its smallest value, "max:val/accuracy" for its largest.

    >>> load_best("runs/digits-2026.11.15-14.30-x7k2", {"models": {"net": net.state_dict()}})  # doctest: +SKIP
    """
    parent, _ = resolve_root(where)
    exchange = RankExchange(f"find the best checkpoint in {parent}")
    while True:
        path = exchange.from_root(lambda: str(find_best(parent, metric=metric)))
        try:
            return load(path, state)
        except UsageError:
            if exchange.from_root(Path(path).is_dir):
                raise  # otherwise a process that trains has saved a better one and removed this one


def find_valid(where: CheckpointRoot) -> Path | None:
    """Returns the newest valid checkpoint, the same on all ranks; None if there never was one.

    Damaged ones are renamed to step-N.corrupt-M and kept, unless another process trains in the run. If there are
    checkpoints and none is valid, all ranks raise `NoValidCheckpoint`: a run must not start from scratch by itself.

        path = hw.checkpoint.find_valid("checkpoints")          # checkpoints/step-000000001000
    """
    found = _find_valid(where)
    return None if found is None else found[0]


def _find_valid(where: CheckpointRoot) -> tuple[Path, str | None] | None:
    """Returns the newest valid checkpoint, and the name of its save."""
    parent, _ = resolve_root(where)
    checked, damaged = set[int](), list[str]()
    exchange = RankExchange(f"find a valid checkpoint in {parent}")
    exchange.from_root(partial(_put_back, where))
    # listed again each time: another process may save and remove checkpoints in the meantime
    while (step := exchange.from_root(partial(_newest, parent, checked))) is not None:
        checked.add(step)
        path = step_dir(parent, step)
        save, problems = verify_on_all_ranks(exchange, path)
        if not problems:
            return path, save
        name = exchange.from_root(partial(_set_aside, where, path))
        if name is not None:
            damaged.append(f"{name}: {problems[0]}")
    if exchange.from_root(lambda: has_checkpoints(parent)):
        raise NoValidCheckpoint(
            f"{parent} has checkpoints, but none is valid ({'; '.join(damaged[:5]) or 'all were renamed before'}). "
            "See headway checkpoint verify PATH; to start from scratch, move that directory away"
        )
    return None


def _newest(parent: Path, excluded: Collection[int]) -> int | None:
    return max((step for step in list_steps(parent) if step not in excluded), default=None)


def verify_on_all_ranks(exchange: RankExchange, path: Path) -> tuple[str | None, list[str]]:
    """Returns the name of a checkpoint's save, and its problems, the same on all ranks; each rank reads some files.

    If it is replaced or removed while they read, the ranks may have read parts of two saves: all check it again.
    """
    for pause_s in _LOOK_PAUSES_S:
        time.sleep(pause_s)
        found = exchange.all_gather(partial(check, path, rank=exchange.rank, size=exchange.size))
        saves = {save for save, _ in found}
        problems = list(dict.fromkeys(problem for _, of_rank in found for problem in of_rank))
        if len(saves) == 1 and (not problems or exchange.from_root(partial(read_save, path)) in saves):
            return saves.pop(), problems
    raise StorageError(
        f"the ranks read different checkpoints at {path}: its file system shows changes late, or it is being replaced; "
        "try again"
    )


def _put_back(where: CheckpointRoot) -> None:
    """Completes or undoes the work of a save that was killed while it replaced a checkpoint."""
    parent, owner = resolve_root(where)
    if parent.is_dir() and _may_rename(where):
        with files.storage(f"look for checkpoints in {parent}"):
            disk.put_back(parent, owner)


def _set_aside(where: CheckpointRoot, path: Path) -> str | None:
    """Renames a damaged checkpoint if possible; returns the name that it has then, or None if it no longer exists."""
    if not os.path.lexists(path):
        return None
    if not _may_rename(where):
        return path.name  # the process that trains there will rename it
    kept = corrupt_path(path)
    with files.storage(f"rename the damaged {path}"):
        try:
            failpoint("checkpoint.before_set_aside")
            path.rename(kept)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            return path.name  # an archive, or another user's directory
        failpoint("checkpoint.after_set_aside")
        files.sync_dir(path.parent)
    return kept.name


def _may_rename(where: CheckpointRoot) -> bool:
    """Returns whether no other process trains in the run of these checkpoints."""
    if isinstance(where, Run):
        return where.is_ours()
    parent, _ = resolve_root(where)
    run = RunPaths(path=parent if has_info(parent) else parent.parent)
    with files.storage(f"find the process that trains in {run.path}"):
        try:
            check_free(run.lock_dir)
        except (RunLocked, PermissionError):  # or another user's run, which shares only its checkpoints
            return False
    return True


def _load(path: Path, save: str | None, state: _Destinations) -> LoadedCheckpoint | None:
    """Loads a checkpoint that was just verified; all ranks return or all raise.

    None if the verified save no longer exists: it was replaced or removed while the ranks were reading, and some of
    them may see that before others do.
    """
    results: list[LoadedCheckpoint] = []

    def read() -> str | None:
        try:
            # on all ranks, and where damage is caught: a function may read the index
            wanted = state(path) if callable(state) else state
            with CheckpointDirectory(path) as directory:
                manifest = read_manifest(directory)
                if manifest.save != save:
                    return _REPLACED
                results.append(_read(directory, manifest, wanted))
        except MovedCheckpoint:
            return _REPLACED
        except DamagedCheckpoint as problem:
            return str(problem)
        return None

    exchange = RankExchange(f"read {path}")
    problems = [problem for problem in exchange.all_gather(read) if problem is not None]
    if not problems:
        return results[0]
    if _REPLACED in problems or set(exchange.all_gather(partial(read_save, path))) != {save}:
        return None
    raise NoValidCheckpoint(
        f"{path} was damaged while it was being read: {problems[0]}. Take another checkpoint"
    )


def _read(
    directory: CheckpointDirectory, manifest: Manifest, state: Mapping[str, Any] | None
) -> LoadedCheckpoint:
    reader = CheckpointReader(directory, read_index(directory, manifest))
    saved = read_document(directory, manifest, STATE)
    wanted = _wanted_parts(saved, state, directory.path)
    given = tree.split(state or {})[1]
    tensors = _destinations(reader, wanted, given, directory.path)
    reader.fill(tensors)
    return LoadedCheckpoint(
        path=directory.path,
        step=manifest.step,
        world_size=manifest.world_size,
        state=tree.join(wanted, tensors),
        local=_read_local(directory, manifest),
        metrics=manifest.metrics,
        save=manifest.save,
    )


def _wanted_parts(saved: Any, state: Mapping[str, Any] | None, path: Path) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise DamagedCheckpoint(f"{STATE}: it is not a state")
    if state is None:
        return saved
    missing = [part for part in state if part not in saved]
    if missing:
        raise UsageError(f"{path} has no part {missing[0]!r}: its parts are {', '.join(map(repr, saved))}")
    return {part: saved[part] for part in state}


def _destinations(
    reader: CheckpointReader, wanted: dict[str, Any], given: dict[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """Returns the tensor that each saved one is read into: the given one, or a new one."""
    names = tree.names_in(wanted)
    saved = set(names)  # a model may have 100,000 tensors
    unknown = [name for name in given if name not in saved]
    if unknown:
        raise UsageError(
            f"{path} has no tensor {unknown[0]!r} ({len(unknown)} are missing): is it from another model?"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name not in reader.entries:
            raise DamagedCheckpoint(f"{STATE}: there is no tensor {name!r:.100}")
        entry = reader.entries[name]
        tensor = given.get(name)
        if tensor is None:
            tensor = torch.empty(entry.shape, dtype=dtypes.BY_NAME[entry.dtype])
        elif tensor.is_meta:
            raise UsageError(
                f"{name!r} is a meta tensor, which has no memory to load {path} into: call the model's "
                "to_empty(device=...) first"
            )
        elif tuple(tensor.shape) != entry.shape or tensor.dtype != dtypes.BY_NAME[entry.dtype]:
            raise UsageError(
                f"{name!r} was saved in {path} as {dtypes.BY_NAME[entry.dtype]} {list(entry.shape)} and is now "
                f"{tensor.dtype} {list(tensor.shape)}: load it into a model of the same size and type"
            )
        tensors[name] = tensor
    return tensors


def _read_local(directory: CheckpointDirectory, manifest: Manifest) -> Any:
    name = f"rank-{rank_and_size()[0]:05d}.json"
    if name not in manifest.files:
        return None
    return tree.join(read_document(directory, manifest, name), {})
