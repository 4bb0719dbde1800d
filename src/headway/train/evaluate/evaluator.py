"""`evaluate`: the metrics of a stage on datasets, with chosen weights and without training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway import data, dist
from headway.dist.collective.exchange import gather_rows
from headway.dist.objects import report_root
from headway.errors import UsageError
from headway.run import Run, check_name
from headway.system.redact import redact_names
from headway.train.batches import count_batches
from headway.train.evaluate.mode import val_batches
from headway.train.evaluate.pause import reading_from_start
from headway.train.evaluate.session import (
    EvalProgress,
    EvalWeights,
    find_dataset,
    session,
)
from headway.train.metrics.bad_samples import BadSamples
from headway.train.metrics.epoch_metrics import compute_metrics
from headway.train.metrics.meter import Value
from headway.train.resume import rng
from headway.train.settings import limit_batches
from headway.train.train_val_state import TrainValState

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage

_LOADERS = (data.DataLoader, data.ShardLoader, torch.utils.data.DataLoader)
EvalDatasets = str | Iterable[Any] | Mapping[str, Iterable[Any]]


def evaluate(
    pipe: Pipeline,
    stage: Stage,
    dataset: EvalDatasets | None,
    *,
    kind: str,
    name: str | None,
    weights: EvalWeights,
    run: Run | str | Path | None,
) -> dict[str, Value]:
    """Runs the validation steps of a stage and returns the metrics, the same on all ranks."""
    state = stage._loop
    if not isinstance(state, TrainValState):
        raise UsageError(
            f"stage {stage.name!r} has a loop of its own, which cannot be evaluated: use a TrainValStage, or "
            "pipe.predict()"
        )
    with session(pipe, stage, weights=weights, run=run) as opened:
        named = _loaders(pipe, state, dataset, kind)
        name = check_name(name or (next(iter(named)) if len(named) == 1 else kind))
        began = time.monotonic()
        what = kind if name == kind else f"{kind} {name}"
        values = _compute(state, named, what)
        datasets = [dataset] if isinstance(dataset, str) else list(named)
        row = {"kind": kind, "stage": stage.name, "datasets": datasets, "metrics": redact_names(values)}
        opened.write(pipe.world, name, {**row, "seconds": round(time.monotonic() - began, 3)})
        shown = ", ".join(f"{key} {value:.6g}" for key, value in values.items() if isinstance(value, float))
        report_root(f"{what}, weights {opened}: {shown}")
    return values


def _loaders(
    pipe: Pipeline, state: TrainValState, dataset: EvalDatasets | None, kind: str
) -> dict[str, Iterable[Any]]:
    """Returns the loaders to evaluate on, by the names that become the prefixes of metrics."""
    if dataset is None:
        given = state.stage.val_dataset() if kind == "val" else pipe.datasets.get(kind)
        if given is None:
            raise UsageError(
                f"there is no dataset {kind!r} to evaluate: register one with pipe.register_dataset({kind!r}, loader), "
                "or pass dataset="
            )
        dataset = given
    if isinstance(dataset, str):
        return {dataset if kind == "val" else kind: find_dataset(pipe, dataset)}
    if isinstance(dataset, Mapping):
        return {check_name(name): find_dataset(pipe, loader) for name, loader in dataset.items()}
    if isinstance(dataset, list | tuple) and any(isinstance(each, _LOADERS) for each in dataset):
        raise UsageError(
            f"{kind} got a {type(dataset).__name__} of {len(dataset)} loaders: pass a dict, whose names become the "
            'prefixes of metrics, such as {"val": val, "ood": ood}'
        )
    return {kind: find_dataset(pipe, dataset)}


def _compute(state: TrainValState, named: Mapping[str, Iterable[Any]], what: str) -> dict[str, Value]:
    stage, settings = state.stage, state.settings
    counts = [
        count_batches(loader, limit_batches(settings, "limit_val_batches", loader))
        for loader in named.values()
    ]
    progress = EvalProgress(what, None if None in counts else sum(count or 0 for count in counts))
    bad_samples = BadSamples(named)
    loaders = {state.prefix_of(name): each for name, each in named.items()}
    taken = dict.fromkeys(loaders, 0)
    fixed = rng.fixed_state(state.device)
    with state.computing(), fixed, reading_from_start(state.run, named.values()):
        with state.evaluating():
            for batch in val_batches(state, loaders):
                state.run.timer.mark("validation")
                taken[state.val_prefix or ""] += 1
                dist.set_phase("evaluation", state.run.steps_done)
                with state.precision.autocast or nullcontext():
                    loss = stage.val_step(batch)
                state.log_val_loss(loss, batch)
                progress.step()
        _check_taken(state, [*named], [*taken.values()])
        bad_samples.log(state.val_meter)
        point = state.val_meter.reduce()
        state.val_meter.finish_epoch()
        values = compute_metrics(state.set_metrics, point.values)
        bad_samples.check(point)
    return values


def _check_taken(state: TrainValState, names: Sequence[str], taken: Sequence[int]) -> None:
    """Raises `UsageError` on all ranks if no rank had a batch of one of the datasets, or there are no datasets."""
    counts = gather_rows(torch.tensor(taken, device=state.device)) if taken else None
    empty = [name for at, name in enumerate(names) if counts is not None and not counts[:, at].any()]
    if empty or not names:
        what = f"dataset {empty[0]!r} has no batch" if empty else "there is no dataset"
        raise UsageError(f"{what} to evaluate: pass a loader with at least one batch")
