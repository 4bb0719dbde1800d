"""Loads weights into a model's tensors by name, and reports the names that do not match."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import torch

from headway.checkpoint.format.manifest import MANIFEST
from headway.checkpoint.format.verification import read_save
from headway.checkpoint.reader import TensorReader
from headway.checkpoint.weights.readers import open_weights
from headway.checkpoint.weights.source import Weights
from headway.dist.collective.exchange import RankExchange
from headway.errors import NoValidCheckpoint, UsageError
from headway.run.paths import step_of
from headway.system.text import shorten_list

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]
"""prefixes of names and their replacements, or a function of the name that returns None to leave it out"""

_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module)\.")
"""parts that wrappers of torch add to names"""

_REMOVED = "removed"  # in place of the name of a save


@final
@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """Which names matched when weights were loaded, by the names in the model.

    pipe.register_model("net", net, init_from="resnet50.safetensors", strict=False)
    print(pipe.registered_models["net"].initial.missing)    # what the file does not have
    """

    path: Path
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    """in the model but not in the weights: they keep their initial values"""
    mismatched: tuple[str, ...]
    """in both, with different shapes: they also keep their initial values"""
    left_over: tuple[str, ...]
    """in the weights but not in the model"""

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        text = f"{len(self.matched):,} of {total:,} tensors from {self.path}"
        for what, names in (
            ("missing", self.missing),
            ("of another shape", self.mismatched),
            ("left over", self.left_over),
        ):
            if names:
                text += f"; {what}: {shorten_list(names, limit=5)}"
        return text


def load_weights(
    weights: Weights,
    tensors: Mapping[str, torch.Tensor],
    *,
    model: str,
    strict: bool = True,
    rename: Rename | None = None,
    ties: Sequence[Sequence[str]] = (),
    optional: Sequence[Collection[str]] = (),
    required: Collection[str] = (),
) -> WeightsReport:
    """Fills the tensors of a model, whole or sharded, in place, on all ranks; returns the report.

    With `strict`, all names must match, on both sides, except that the names of one of the `optional` sets may be
    missing. The `required` ones must always match: their tensors have no values yet. `ties` are groups of names of the
    same tensor, of which one is enough.
    """
    reports: list[WeightsReport] = []

    def read() -> list[str | None]:
        before = read_save(path)
        try:
            with open_weights(path) as reader:
                named = _part(reader, weights, model, path, known=tensors)
                named = _renamed(named, rename, path, known=tensors)
                if weights.ema:
                    named = _without_trained_twins(named, ties)
                report, wanted = _match(reader, named, tensors, path, ties)
                _check(report, model, strict=strict, optional=optional, found=named)
                _check_required(report, model, required)
                with torch.no_grad():
                    reader.fill(wanted)
                reports.append(report)
        except (NoValidCheckpoint, UsageError):
            # training removes only checkpoints; a file may be missing on this node alone
            if step_of(path.name) is not None and not os.path.lexists(path):
                return [before, _REMOVED]
            if read_save(path) == before:
                raise
        return [before, read_save(path)]

    while True:
        path = weights.locate()
        saves = RankExchange(f"read weights from {path}").all_gather(read)
        if len({save for both in saves for save in both}) == 1:
            return reports[-1]  # otherwise a process that trains replaced or removed it: read again


def _part(
    reader: TensorReader, weights: Weights, model: str, path: Path, *, known: Collection[str]
) -> dict[str, str]:
    """Returns name -> name in the source, for the tensors of one model."""
    wanted = weights.model or model
    parts = _parts(reader, "models", wanted)
    is_file = weights.model is None and not (path / MANIFEST).exists()
    if is_file and any(name in known for name in reader.entries):
        parts = []  # the names are those of the model, which may begin with "models.", too
    if not parts:  # a file, or a checkpoint that a script saved without a pipeline
        if weights.ema:
            raise UsageError(f"{path} has no averaged weights: pass ema=False")
        part = weights.model or (model if path.name.startswith("step-") else "")
        named = any(name.startswith(f"{part}.") for name in reader.entries)
        return _below(reader, f"{part}." if part and named else "")
    if wanted not in parts:
        if weights.model is not None or len(parts) > 1:
            known = ", ".join(map(repr, parts))
            raise UsageError(
                f"{path} has no model {wanted!r}: choose one of {known}, by Weights(..., model=...)"
            )
        wanted = parts[0]
    found = _below(reader, f"models.{wanted}.")
    if weights.ema:
        averages = _below(reader, f"averages.{wanted}.")
        if not averages:
            raise UsageError(f"{path} has no averaged weights of model {wanted!r}: pass ema=False")
        found |= averages  # buffers are not averaged
    return found


def has_averages(weights: Weights, model: str, path: Path) -> bool:
    """Returns whether a file or a checkpoint has averages of the weights that `load_weights` reads for this model."""
    with open_weights(path) as reader:
        wanted = weights.model or model
        parts = _parts(reader, "models", wanted)
        if weights.model is None and wanted not in parts and len(parts) == 1:
            wanted = parts[0]
        return wanted in _parts(reader, "averages", wanted)


def _parts(reader: TensorReader, kind: str, wanted: str) -> list[str]:
    """Returns the models of which a checkpoint has `kind`: "models" or "averages"; the name `wanted` may have dots."""
    names = _below(reader, f"{kind}.")
    return sorted({wanted if name.startswith(f"{wanted}.") else name.split(".")[0] for name in names})


def _below(reader: TensorReader, prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): name for name in reader.entries if name.startswith(prefix)}


def _renamed(
    named: Mapping[str, str], rename: Rename | None, path: Path, *, known: Collection[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, source in named.items():
        new = _new_name(name if name in known else _WRAPPERS.sub("", name), rename)
        if new is None:
            continue
        if new in found:
            raise UsageError(
                f"rename gives {new!r} to two tensors of {path}, {found[new]!r} and {source!r}: give each its own"
            )
        found[new] = source
    return found


def _without_trained_twins(named: Mapping[str, str], ties: Sequence[Sequence[str]]) -> dict[str, str]:
    """Leaves out the trained value of a tied tensor if its average is here, under another of its names.

    A checkpoint has a tied tensor under all of its names, and the average under the first one only. Both would be read
    into the same memory.
    """
    averaged = {name for name, source in named.items() if source.startswith("averages.")}
    twins = {name for names in ties if not averaged.isdisjoint(names) for name in names} - averaged
    return {name: source for name, source in named.items() if name not in twins}


def _new_name(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    for before, after in rename.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _match(
    reader: TensorReader,
    named: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    ties: Sequence[Sequence[str]],
) -> tuple[WeightsReport, dict[str, torch.Tensor]]:
    """Returns the report, and the tensors to fill by their names in the source."""
    both = [name for name in tensors if name in named]
    fitting = [name for name in both if reader.entries[named[name]].shape == tuple(tensors[name].shape)]
    found = set(fitting)
    tied = {name for names in ties if not found.isdisjoint(names) for name in names}
    matched = found | tied
    report = WeightsReport(
        path=path,
        matched=tuple(name for name in tensors if name in matched),
        missing=tuple(name for name in tensors if name not in named and name not in tied),
        mismatched=tuple(name for name in both if name not in found),
        left_over=tuple(name for name in named if name not in tensors),
    )
    return report, {named[name]: tensors[name] for name in fitting}


def _check(
    report: WeightsReport,
    model: str,
    *,
    strict: bool,
    optional: Sequence[Collection[str]],
    found: Iterable[str],
) -> None:
    if not report.matched and report.mismatched:
        raise UsageError(
            f"model {model!r} has no tensor with the same shape as in {report.path}; of another shape: "
            f"{shorten_list(report.mismatched, limit=3)}: build the model with the settings of those weights"
        )
    if not report.matched:
        here = shorten_list([*report.missing, *report.mismatched], limit=3)
        raise UsageError(
            f"model {model!r} has none of the tensors in {report.path}: it has {here}, the weights have "
            f"{shorten_list(list(found), limit=3)}; pass rename={{'old.': 'new.'}}"
        )
    complete = not report.missing or any(set(report.missing) <= set(names) for names in optional)
    if strict and (not complete or report.mismatched or report.left_over):
        raise UsageError(
            f"model {model!r} does not match the given weights: {report}; pass strict=False to "
            "register_model(..., init_from=...) to load what matches, or rename="
        )


def _check_required(report: WeightsReport, model: str, required: Collection[str]) -> None:
    if lacking := [name for name in (*report.missing, *report.mismatched) if name in required]:
        raise UsageError(
            f"model {model!r} was built without values, and {report.path} has none for "
            f"{shorten_list(lacking, limit=5)}: build these parts outside of empty_parameters(), or pass rename="
        )
