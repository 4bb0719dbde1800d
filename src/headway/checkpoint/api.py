"""Save and load, on one rank or on many: what users and the training loop call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed.checkpoint as dcp

from headway.checkpoint.format import dtypes, manifest as layout, tree
from headway.checkpoint.format.manifest import Damaged, Folder, Manifest, Place
from headway.checkpoint.reader import Reader
from headway.checkpoint.write.saver import Saver
from headway.dist.collective.exchange import RankExchange, rank_and_size
from headway.errors import NoValidCheckpoint, UsageError
from headway.run.lock import RunLock
from headway.system import files
from headway.system.failpoints import failpoint


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint held: the state, and what this rank had kept for itself (None if it had nothing)."""

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]
    local: Any
    metrics: Mapping[str, float]


def save(
    where: Place,
    state: Mapping[str, Any],
    *,
    step: int,
    local: object = None,
    metrics: Mapping[str, float] | None = None,
    lock: RunLock | None = None,
) -> Path:
    """Saves a state as one checkpoint; when it returns, on every rank, the checkpoint is whole and on disk.

    `state` is a dict of named parts: state dicts of models and optimisers (plain tensors, or the DTensors of FSDP2 and
    tensor parallelism), and plain values. All ranks call it, with the same values except for the shards of tensors.
    `local` is JSON that only this rank has, like the state of its random numbers. `metrics` are numbers to choose the
    best checkpoint by. `lock` is the run's lock, on rank 0: the save fails if somebody took the run over meanwhile.

    If any rank fails, all raise, and nothing is left behind: `StorageError` for a full or broken disk, `UsageError` for
    what a checkpoint cannot hold.

    >>> save(run, {"net": net.state_dict(), "sgd": sgd.state_dict(), "epoch": 3}, step=1000)  # doctest: +SKIP
    """
    saver = Saver(where, lock=lock, background=False)
    saver.save(state, step=step, local=local, metrics=metrics)
    return saver.finished()[0].path


def load(directory: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> Loaded:
    """Loads one checkpoint, on any number of ranks, after checking every byte of it.

    `state` names the parts to load, all of them if it is None. Its tensors are filled in place, each rank reading the
    shards that it has; what the checkpoint has beyond them is made new, whole, on the CPU. `NoValidCheckpoint` if the
    checkpoint is damaged, `UsageError` if there is none or it does not fit the state, which is then as it was.

    >>> epoch = load(path, {"net": net.state_dict(), "epoch": None}).state["epoch"]  # doctest: +SKIP
    """
    path = Path(directory).absolute()
    exchange = RankExchange(f"read {path}")
    if not exchange.from_root(path.is_dir):
        raise UsageError(f"there is no checkpoint at {path}; see those of a run: headway checkpoint show RUN")
    problems = _verify_together(exchange, path)
    if problems:
        raise NoValidCheckpoint(f"{path} is damaged: {'; '.join(problems[:5])}. Take another checkpoint")
    return _load(path, state)


def load_latest(
    where: Place, state: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] | None = None
) -> Loaded | None:
    """Loads the newest whole checkpoint of a run; None if there never was one. See `load` and `find_valid`.

    `state` may be a function that makes it when the checkpoint is known.
    """
    path = find_valid(where)
    if path is None:
        return None
    return _load(path, state(path) if callable(state) else state)


def find_valid(where: Place) -> Path | None:
    """The newest checkpoint that is whole, the same on all ranks; None if there never was one.

    Damaged ones are renamed to step-N.corrupt-M and kept. If there are checkpoints and none is whole, all ranks raise
    `NoValidCheckpoint`: a run must not start over by itself.
    """
    parent, _ = layout.home(where)
    told: list[str] = []
    exchange = RankExchange(f"find a whole checkpoint in {parent}")
    for step in exchange.from_root(lambda: layout.steps(parent))[::-1]:
        path = layout.step_dir(parent, step)
        problems = _verify_together(exchange, path)
        if not problems:
            return path
        aside = exchange.from_root(partial(_set_aside, path))
        told.append(f"{aside}: {problems[0]}")
    if exchange.from_root(lambda: layout.any_traces(parent)):
        raise NoValidCheckpoint(
            f"{parent} has checkpoints, but none is whole ({'; '.join(told[:5]) or 'all were set aside before'}). "
            "Look at them with: headway checkpoint verify PATH; to start over, move that directory away"
        )
    return None


def _verify_together(exchange: RankExchange, path: Path) -> list[str]:
    """The problems of a checkpoint, the same on all ranks; the ranks share the reading."""

    def check() -> list[str]:
        try:
            with Folder(path, announced=exchange.rank > 0) as folder:
                manifest = layout.read_manifest(folder)
                mine = [
                    name
                    for number, name in enumerate(manifest.files)
                    if number % exchange.size == exchange.rank
                ]
                return layout.check_files(folder, manifest, mine) or layout.check_contents(
                    folder, manifest, mine
                )
        except Damaged as problem:
            return [str(problem)]

    return list(dict.fromkeys(problem for found in exchange.all_gather(check) for problem in found))


def _set_aside(path: Path) -> str:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.corrupt-{number}")):
        number += 1
    with files.storage(f"set the damaged {path} aside"):
        failpoint("checkpoint.before_set_aside")
        path.rename(aside)
        failpoint("checkpoint.after_set_aside")
        files.sync_dir(path.parent)
    return aside.name


def _load(path: Path, state: Mapping[str, Any] | None) -> Loaded:
    """Loads a checkpoint that was just verified; all ranks succeed or all raise."""
    results: list[Loaded] = []

    def read() -> None:
        try:
            with Folder(path) as folder:
                results.append(_read(folder, layout.read_manifest(folder), state))
        except Damaged as problem:
            raise NoValidCheckpoint(f"{path} was damaged while it was read: {problem}") from problem

    RankExchange(f"read {path}").all_gather(read)
    return results[0]


def _read(folder: Folder, manifest: Manifest, state: Mapping[str, Any] | None) -> Loaded:
    reader = Reader(folder, manifest)
    saved = layout.read_part(folder, manifest, layout.STATE)
    wanted = _wanted_parts(saved, state, folder.path)
    given = tree.split(state or {})[1]
    tensors = _destinations(reader, wanted, given, folder.path)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, reader.read_metadata(), False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)
    return Loaded(
        path=folder.path,
        step=manifest.step,
        world_size=manifest.world_size,
        state=tree.join(wanted, tensors),
        local=_own(folder, manifest),
        metrics=manifest.metrics,
    )


def _wanted_parts(saved: Any, state: Mapping[str, Any] | None, path: Path) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise Damaged(f"{layout.STATE}: it is not a state")
    if state is None:
        return saved
    missing = [part for part in state if part not in saved]
    if missing:
        raise UsageError(f"{path} has no part {missing[0]!r}: its parts are {', '.join(map(repr, saved))}")
    return {part: saved[part] for part in state}


def _destinations(
    reader: Reader, wanted: dict[str, Any], given: dict[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """Where each wanted tensor goes: the given one, or a new one."""
    names = tree.names_in(wanted)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(
            f"{path} has no tensor {unknown[0]!r} ({len(unknown)} such): is it of another model?"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name not in reader.entries:
            raise Damaged(f"{layout.STATE}: there is no tensor {name!r:.100}")
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


def _own(folder: Folder, manifest: Manifest) -> Any:
    name = f"rank-{rank_and_size()[0]:05d}.json"
    if name not in manifest.files:
        return None
    return tree.join(layout.read_part(folder, manifest, name), {})
