"""`save`, `load`, `load_latest` and `find_valid`, on one rank or on many: what users and the training loop call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    has_checkpoints,
    list_steps,
    resolve_root,
    step_dir,
)
from headway.checkpoint.format.manifest import STATE, Manifest, read_document, read_index, read_manifest
from headway.checkpoint.format.verification import check_contents, check_files
from headway.checkpoint.inspect.listing import find_best
from headway.checkpoint.reader import CheckpointReader
from headway.checkpoint.write import disk
from headway.checkpoint.write.saver import Saver
from headway.dist.collective.exchange import RankExchange, rank_and_size
from headway.errors import NoValidCheckpoint, UsageError
from headway.run import Run
from headway.run.lock import RunLock
from headway.system import files
from headway.system.failpoints import failpoint


@final
@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint holds: the state, and what this rank alone had saved (None if it had nothing).

    loaded = hw.checkpoint.load("runs/digits-2026.11.15-14.30-x7k2/checkpoints/step-000000001000")
    print(loaded.step, loaded.state["epoch"], loaded.path)
    """

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]
    local: Any
    metrics: Mapping[str, float]


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
    `local` is JSON that only this rank has, such as the state of its random number generators. `metrics` are numbers to
    choose the best checkpoint by. `lock` is the run's lock, on rank 0: the save fails if another process took over the
    run.

    If any rank fails, all raise, and nothing is left: `StorageError` for a full or broken disk, `UsageError` for what a
    checkpoint cannot hold.

    >>> save(run, {"net": net.state_dict(), "sgd": sgd.state_dict(), "epoch": 3}, step=1000)  # doctest: +SKIP
    """
    saver = Saver(where, lock=lock, background=False)
    saver.save(state, step=step, local=local, metrics=metrics)
    return saver.finished()[0].path


def load(directory: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> LoadedCheckpoint:
    """Loads one checkpoint, on any number of ranks, after checking every byte of it.

    `state` names the parts to load, all of them if it is None. Its tensors are filled in place, each rank reading the
    shards that it has; tensors that only the checkpoint has are created on the CPU. `NoValidCheckpoint` if the
    checkpoint is damaged, `UsageError` if there is none or it does not fit the state, which is then unchanged.

    >>> epoch = load(path, {"net": net.state_dict(), "epoch": None}).state["epoch"]  # doctest: +SKIP
    """
    path = Path(directory).absolute()
    exchange = RankExchange(f"read {path}")
    if not exchange.from_root(path.is_dir):
        raise UsageError(
            f"there is no checkpoint at {path}; list those of a run with: headway checkpoint show RUN"
        )
    problems = verify_on_all_ranks(exchange, path)
    if problems:
        raise NoValidCheckpoint(f"{path} is damaged: {'; '.join(problems[:5])}. Take another checkpoint")
    return _load(path, state)


def load_latest(
    where: CheckpointRoot, state: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] | None = None
) -> LoadedCheckpoint | None:
    """Loads the newest valid checkpoint of a run; None if there never was one. See `load` and `find_valid`.

    `state` may be a function that returns it for the path of the checkpoint.

        loaded = hw.checkpoint.load_latest("checkpoints", {"net": net.state_dict()})
        step = loaded.step if loaded else 0                     # net was filled in place
    """
    path = find_valid(where)
    if path is None:
        return None
    return _load(path, state(path) if callable(state) else state)


def load_best(
    where: CheckpointRoot, state: Mapping[str, Any] | None = None, *, metric: str | None = None
) -> LoadedCheckpoint:
    """Loads the best checkpoint of a run, by the metric of its `keep_best`. See `load`.

    `metric` chooses by another one, "val/loss" for the smallest value or "max:val/accuracy" for the largest.

    >>> load_best("runs/digits-2026.11.15-14.30-x7k2", {"models": {"net": net.state_dict()}})  # doctest: +SKIP
    """
    parent, _ = resolve_root(where)
    exchange = RankExchange(f"find the best checkpoint in {parent}")
    return load(exchange.from_root(lambda: str(find_best(parent, metric=metric).path)), state)


def find_valid(where: CheckpointRoot) -> Path | None:
    """Returns the newest valid checkpoint, the same on all ranks; None if there never was one.

    Damaged ones are renamed to step-N.corrupt-M and kept, unless another process trains in the run. If there are
    checkpoints and none is valid, all ranks raise `NoValidCheckpoint`: a run must not start from scratch by itself.

        path = hw.checkpoint.find_valid("checkpoints")          # checkpoints/step-000000001000
    """
    parent, _ = resolve_root(where)
    damaged: list[str] = []
    exchange = RankExchange(f"find a valid checkpoint in {parent}")
    exchange.from_root(partial(_put_back, where))
    for step in exchange.from_root(lambda: list_steps(parent))[::-1]:
        path = step_dir(parent, step)
        problems = verify_on_all_ranks(exchange, path)
        if not problems:
            return path
        aside = exchange.from_root(partial(_set_aside, where, path))
        damaged.append(f"{aside}: {problems[0]}")
    if exchange.from_root(lambda: has_checkpoints(parent)):
        raise NoValidCheckpoint(
            f"{parent} has checkpoints, but none is valid ({'; '.join(damaged[:5]) or 'all were renamed before'}). "
            "See headway checkpoint verify PATH; to start from scratch, move that directory away"
        )
    return None


def verify_on_all_ranks(exchange: RankExchange, path: Path) -> list[str]:
    """Returns the problems of a checkpoint, the same on all ranks; the ranks share the reading."""

    def check() -> list[str]:
        try:
            with CheckpointDirectory(path, announced=exchange.rank > 0) as directory:
                manifest = read_manifest(directory)
                mine = [
                    name
                    for number, name in enumerate(manifest.files)
                    if number % exchange.size == exchange.rank
                ]
                return check_files(directory, manifest, mine) or check_contents(directory, manifest, mine)
        except DamagedCheckpoint as problem:
            return [str(problem)]

    return list(dict.fromkeys(problem for found in exchange.all_gather(check) for problem in found))


def _put_back(where: CheckpointRoot) -> None:
    """Finishes what a save left that was killed while it replaced a checkpoint."""
    parent, owner = resolve_root(where)
    if parent.is_dir() and not (isinstance(where, Run) and not where.is_ours()):
        with files.storage(f"look for checkpoints in {parent}"):
            disk.put_back(parent, owner)


def _set_aside(where: CheckpointRoot, path: Path) -> str:
    if isinstance(where, Run) and not where.is_ours():
        return path.name  # for the process that trains there to find
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.corrupt-{number}")):
        number += 1
    with files.storage(f"rename the damaged {path}"):
        failpoint("checkpoint.before_set_aside")
        path.rename(aside)
        failpoint("checkpoint.after_set_aside")
        files.sync_dir(path.parent)
    return aside.name


def _load(path: Path, state: Mapping[str, Any] | None) -> LoadedCheckpoint:
    """Loads a checkpoint that was just verified; all ranks return or all raise."""
    results: list[LoadedCheckpoint] = []

    def read() -> None:
        try:
            with CheckpointDirectory(path) as directory:
                results.append(_read(directory, read_manifest(directory), state))
        except DamagedCheckpoint as problem:
            raise NoValidCheckpoint(
                f"{path} was damaged while it was being read: {problem}. Take another checkpoint"
            ) from problem

    RankExchange(f"read {path}").all_gather(read)
    return results[0]


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
    """Returns the tensor that each wanted one is read into: the given one, or a new one."""
    names = tree.names_in(wanted)
    unknown = [name for name in given if name not in names]
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
