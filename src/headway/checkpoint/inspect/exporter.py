"""`export`: a checkpoint as plain safetensors, in one file, or in several with an index for Hugging Face."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.checkpoint.format import tree
from headway.checkpoint.format.directory import CheckpointDirectory, DamagedCheckpoint
from headway.checkpoint.format.manifest import (
    ITEM_BYTES,
    METADATA,
    STATE,
    Manifest,
    read_document,
    read_index,
    read_manifest,
)
from headway.checkpoint.format.tensor_file import bytes_of, header_of, table_of
from headway.checkpoint.format.verification import find_problems, read_save
from headway.checkpoint.reader import CheckpointReader
from headway.checkpoint.write.disk import write_file
from headway.errors import NoValidCheckpoint, UsageError
from headway.system import files

SHARD_BYTES = 5_000_000_000  # Hugging Face's default


def export(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    part: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the tensors of a checkpoint as new safetensors files, one tensor at a time; returns their paths.

    `part` selects a part of the state, such as `net`, or `models.net` of a `Pipeline`, and removes its name from the
    names of the tensors, as a model's `load_state_dict` expects. Tensors of more than `shard_bytes` in all are split
    over net-00001-of-00003.safetensors and so on, with net.safetensors.index.json.

    >>> export(path, "net.safetensors", part="net")  # doctest: +SKIP
    [PosixPath('net.safetensors')]
    """
    source, target = Path(directory).absolute(), Path(out).absolute()
    if not target.name:
        raise UsageError(f"{str(out)!r} is not the name of a file: give a name like net.safetensors")
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes={shard_bytes} is not a valid size: give 1 or more")
    with _verified(source) as (opened, manifest):
        reader = CheckpointReader(opened, read_index(opened, manifest))
        names = _chosen(read_document(opened, manifest, STATE), reader, part, source)
        shards = _shards(reader, names, shard_bytes)
        return _write(reader, names, shards, target, {"format": "pt", "step": str(manifest.step)})


def export_adapter(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], *, model: str | None = None
) -> list[Path]:
    """Writes the adapter of a model, such as LoRA, as a new directory that `PeftModel.from_pretrained` reads.

    `model` is the name that the model was registered under; by default the first one with an adapter.

    >>> export_adapter(path, "adapter")  # doctest: +SKIP
    [PosixPath('adapter/adapter_model.safetensors'), PosixPath('adapter/adapter_config.json')]
    """
    source, target = Path(directory).absolute(), Path(out).absolute()
    with _verified(source) as (opened, manifest):
        state = read_document(opened, manifest, STATE)
        adapters = _of_run(state, "adapters")
        if not adapters or (model or next(iter(adapters))) not in adapters:
            known = ", ".join(map(repr, adapters)) or "none"
            raise UsageError(f"{source} has no adapter of model {model!r}: models with adapters are {known}")
        chosen = model or next(iter(adapters))
        reader = CheckpointReader(opened, read_index(opened, manifest))
        adapter = str(_of_run(state, "adapter_names").get(chosen, "default"))  # older checkpoints have none
        names = _adapter_tensors(reader, f"models.{chosen}.", adapter)
        if not names:
            raise UsageError(
                f"{source} has no tensor of an adapter {adapter!r} of model {chosen!r}: train it first"
            )
        if os.path.lexists(target):
            raise UsageError(f"{target} exists already: choose another name, or remove it")
        about = {"format": "pt", "step": str(manifest.step)}
        config = json.dumps(adapters[chosen], indent=2, sort_keys=True).encode() + b"\n"
        with _new_directory(target) as staged:
            _write(reader, names, [list(names)], staged / "adapter_model.safetensors", about)
            files.write_new(staged / "adapter_config.json", config)
    return [target / "adapter_model.safetensors", target / "adapter_config.json"]


@contextmanager
def _verified(source: Path) -> Iterator[tuple[CheckpointDirectory, Manifest]]:
    """Opens a checkpoint and checks every byte of it, for the block that reads it."""
    save = None
    try:
        with CheckpointDirectory(source) as opened:
            manifest = read_manifest(opened)
            save = manifest.save
            if problems := find_problems(opened, manifest, manifest.files):
                raise DamagedCheckpoint("; ".join(problems[:5]))
            yield opened, manifest
    except DamagedCheckpoint as problem:
        if save != read_save(source):
            raise UsageError(
                f"{source} was removed or replaced by a later save while it was being read: try again"
            ) from problem
        raise NoValidCheckpoint(f"{source} is damaged: {problem}. Take another checkpoint") from problem


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """Yields a hidden directory, which is renamed to `target` after the block; after an error nothing is left."""
    staged = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    with files.storage(f"write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        files.make_dir(staged)
        try:
            yield staged
            files.sync_dir(staged)
            staged.rename(target)
            files.sync_dir(target.parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _of_run(state: object, key: str) -> dict[str, object]:
    run = state.get("run") if isinstance(state, dict) else None
    found = run.get(key) if isinstance(run, dict) else None
    return found if isinstance(found, dict) else {}


def adapter_infix(adapter: str) -> re.Pattern[str]:
    """Returns what peft's files leave out of names: the adapter, last but for one part, or after `modules_to_save`."""
    word = re.escape(adapter)
    return re.compile(rf"\.modules_to_save\.{word}(?=\.)|\.{word}(?=(\.[^.]+)?$)")


def _adapter_tensors(reader: CheckpointReader, prefix: str, adapter: str) -> dict[str, str]:
    """Returns name in the checkpoint -> name in peft's files, for all saved tensors; none without the adapter.

    A checkpoint has the trained parameters and no frozen ones. They include biases, whose names do not contain that of
    the adapter.
    """
    infix = adapter_infix(adapter)
    named = {name: name.removeprefix(prefix) for name in reader.entries if name.startswith(prefix)}
    found = {name: infix.sub("", short) for name, short in named.items()}
    return found if found != named else {}


def _chosen(
    state: dict[str, object], reader: CheckpointReader, part: str | None, source: Path
) -> dict[str, str]:
    """Returns name in the checkpoint -> name in the file, for the tensors to write."""
    if part is None:
        return {name: name for name in reader.entries}
    parts = dict(_with_tensors(state))
    if part not in parts:
        known = ", ".join(map(repr, parts))
        raise UsageError(f"{source} has no part {part!r} with tensors: its parts with tensors are {known}")
    chosen = {name: name.removeprefix(f"{part}.") for name in parts[part]}
    _check_names(chosen, source)
    return chosen


def _check_names(chosen: dict[str, str], source: Path) -> None:
    """Raises `UsageError` if a safetensors file could not have all tensors, by their names in it."""
    if twice := [name for name, count in Counter(chosen.values()).items() if count > 1]:
        raise UsageError(
            f"two tensors of {source} would have the name {twice[0]!r:.100}: export it without --part"
        )
    if METADATA in chosen.values():
        raise UsageError(f"{METADATA!r} is a name that safetensors reserves: export {source} without --part")


def _with_tensors(state: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yields the parts of a state, and the parts of those, with their tensor names: models, models.net, ..."""
    for part, inside in state.items():
        if names := tree.names_in(inside):
            yield part, names
        for key, inner in inside.items() if isinstance(inside, dict) else ():
            if inner != {"$tensor": f"{part}.{key}"} and (names := tree.names_in(inner)):
                yield f"{part}.{key}", names


def _shards(reader: CheckpointReader, names: dict[str, str], shard_bytes: int) -> list[list[str]]:
    """Returns the tensors of each file: in the order of the state, as many as fit."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in names:
        size = reader.entries[name].bytes
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write(
    reader: CheckpointReader,
    names: dict[str, str],
    shards: list[list[str]],
    target: Path,
    about: dict[str, str],
) -> list[Path]:
    """Writes all files or none: they are renamed when all are on disk, the index last."""
    token = secrets.token_hex(8)
    stem, count = target.name.removesuffix(".safetensors"), len(shards)
    paths = [target.with_name(f"{stem}-{n:05d}-of-{count:05d}.safetensors") for n in range(1, count + 1)]
    paths = [*paths, target.with_name(f"{stem}.safetensors.index.json")] if count > 1 else [target]
    for path in paths:
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already: choose another name, or remove it")
    staged = [path.with_name(f".{path.name}.{token}.tmp") for path in paths]
    with files.storage(f"write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            for hidden, shard in zip(staged, shards, strict=False):
                write_file(hidden, _parts(reader, shard, names, about))
            if count > 1:
                write_file(staged[-1], [memoryview(_index(reader, names, shards, paths))])
            for hidden, path in zip(staged, paths, strict=True):
                hidden.rename(path)
            files.sync_dir(target.parent)
        finally:
            for hidden in staged:
                with suppress(OSError):
                    hidden.unlink()
    return paths


def _parts(
    reader: CheckpointReader, shard: list[str], names: dict[str, str], about: dict[str, str]
) -> Iterator[memoryview]:
    order = sorted(shard, key=lambda name: (-ITEM_BYTES[reader.entries[name].dtype], name))
    entries = [(names[name], reader.entries[name].dtype, reader.entries[name].shape) for name in order]
    yield memoryview(header_of(table_of(entries)[0], about))
    for name in order:
        tensor = reader.read_whole(name)
        if tensor.numel():
            yield bytes_of(tensor)


def _index(
    reader: CheckpointReader, names: dict[str, str], shards: list[list[str]], paths: list[Path]
) -> bytes:
    where = {names[name]: path.name for shard, path in zip(shards, paths, strict=False) for name in shard}
    total = sum(reader.entries[name].bytes for name in names)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n"
