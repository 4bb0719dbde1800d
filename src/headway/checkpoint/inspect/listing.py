"""The list of a run's checkpoints, with the newest and the best of them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from headway.checkpoint.format.directory import (
    CheckpointDirectory,
    DamagedCheckpoint,
    checkpoints_at,
    step_dir,
)
from headway.checkpoint.format.manifest import STATE, Manifest, read_document, read_manifest
from headway.checkpoint.retention import read_manifests
from headway.checkpoint.settings import CheckpointSettings
from headway.errors import UsageError
from headway.system.log import logger

_USUAL_METRIC = "val/loss"
"""the metric that decides which checkpoint is the best if the run had no `keep_best`"""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint of a run, as its manifest describes it."""

    path: Path
    step: int
    created: str
    world_size: int
    bytes: int
    metrics: Mapping[str, float]
    newest: bool
    best: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path), "metrics": dict(self.metrics)}


def list_checkpoints(where: Path, *, metric: str | None = None) -> list[CheckpointSummary]:
    """Returns the checkpoints of a run, or of a directory of checkpoints, the newest first.

    The best is the best by `metric`, by default the `keep_best` that the run was trained with. Directories without a
    valid manifest are left out.
    """
    parent = checkpoints_at(where.absolute())
    manifests = read_manifests(parent)
    if not manifests:
        return []
    newest = max(manifests)
    best = _best(manifests, metric or _kept_metric(parent, manifests) or _USUAL_METRIC)
    return [
        CheckpointSummary(
            path=step_dir(parent, step),
            step=step,
            created=manifest.created,
            world_size=manifest.world_size,
            bytes=sum(file.bytes for file in manifest.files.values()),
            metrics=manifest.metrics,
            newest=step == newest,
            best=step in best,
        )
        for step, manifest in sorted(manifests.items(), reverse=True)
    ]


def find_best(where: Path, *, metric: str | None = None) -> Path:
    """Returns the checkpoint of a run with the best metric; `UsageError` if none has it.

    It warns if the run had no `keep_best`, since the best one may then have been removed.
    """
    parent = checkpoints_at(where.absolute())
    manifests = read_manifests(parent)
    if not manifests:
        raise UsageError(f"{where} has no checkpoints: choose another run; to list runs: headway runs")
    kept = _kept_metric(parent, manifests) if metric is None else None
    wanted = metric or kept or _USUAL_METRIC
    best = _best(manifests, wanted)
    if not best:
        saved = ", ".join(sorted({name for each in manifests.values() for name in each.metrics})) or "none"
        raise UsageError(
            f"no checkpoint of {where} has the metric {wanted!r}, so none is the best; saved metrics: {saved}"
        )
    step = best.pop()
    if metric is None and kept is None:
        logger.warning(
            f"{where} was trained without keep_best: step {step:,} has the lowest {_USUAL_METRIC} of the "
            "checkpoints that are left, and a better one may have been removed; give "
            f'enable_checkpointing(keep_best="{_USUAL_METRIC}")'
        )
    return step_dir(parent, step)


def _kept_metric(parent: Path, manifests: Mapping[int, Manifest]) -> str | None:
    """Returns the `keep_best` of the newest readable checkpoint; None if it has none."""
    for step in sorted(manifests, reverse=True):
        try:
            with CheckpointDirectory(step_dir(parent, step)) as directory:
                state = read_document(directory, read_manifest(directory), STATE)
        except DamagedCheckpoint:
            continue
        match state:
            case {"run": {"keep_best": str(metric)}}:
                return metric
        break  # all checkpoints of a run have the same; those of earlier versions have none
    return None


def _best(manifests: dict[int, Manifest], metric: str) -> set[int]:
    return CheckpointSettings(keep_best=metric).retention.best_of(manifests)
