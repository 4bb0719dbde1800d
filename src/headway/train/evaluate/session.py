"""An evaluation session: the run that it belongs to, the weights that it uses, and the row that it writes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from torch import Tensor

from headway import dist
from headway.checkpoint import Weights
from headway.checkpoint.weights.loading import has_averages, load_weights
from headway.checkpoint.weights.readers import read_stamps
from headway.dist.collective.guard import from_root
from headway.dist.group import current
from headway.dist.objects import report_root
from headway.errors import NoValidCheckpoint, UsageError
from headway.run import Run, find_runs, own_runs, runs_under
from headway.run.info import newest_step
from headway.system import environment, files
from headway.system.jsonlines import JsonLinesWriter
from headway.train.diagnose.plan_check import PlanCheck
from headway.train.evaluate.pause import pausing
from headway.train.metrics.display import LINE_SECONDS
from headway.train.model.initial_weights import WeightsLike, find_weights
from headway.train.model.parallel import RegisteredModel

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.run_state import RunState
    from headway.train.stage import Stage

EvalWeights: TypeAlias = WeightsLike | int
"""the weights of an evaluation: "last", "best", a step, "raw", "current", or anything that `init_from` takes"""


@final
@dataclass(frozen=True, kw_only=True)
class EvalSession:
    """The run and the weights of one evaluation."""

    run: Run
    source: str
    """where the weights were read from; "current" for those that the models had"""
    identity: Mapping[str, Any]
    """equal only for equal weights; never equal for "current" weights, which may have changed since"""
    step: int | None
    """the step of the checkpoint that the weights are from"""
    averaged: Sequence[str] = ()
    """the models whose averaged weights are used; the others use their trained weights"""

    def __str__(self) -> str:
        return f"{self.source}{' (averaged)' if self.averaged else ''}"

    def write(self, world: dist.World, name: str, row: Mapping[str, Any]) -> None:
        """Appends the row of an evaluation to eval/NAME.jsonl of the run, on rank 0."""
        if not world.is_root:
            return
        with files.storage(f"write to {self.run.eval_dir}"):
            if not self.run.eval_dir.is_dir():
                files.make_dir(self.run.eval_dir)
        facts = {
            "time": time.time(),
            "weights": self.source,
            "step": self.step,
            "averaged": list(self.averaged),
            "world_size": world.world_size,
        }
        with JsonLinesWriter(self.run.eval_file(name), content="results of evaluations") as rows:
            rows.write({**facts, **row})


@contextmanager
def session(
    pipe: Pipeline, stage: Stage, *, weights: EvalWeights, run: Run | str | Path | None
) -> Iterator[EvalSession]:
    """Chooses the run, pauses training, calls hooks that may register parts, and loads the weights."""
    state = pipe._state
    if state.current_stage is not None and weights != "current":
        raise UsageError(
            f"while stage {state.current_stage.name!r} trains, weights={weights!r} would replace the weights that it "
            'trains: pass weights="current", or evaluate after pipe.run()'
        )
    if "pipe" not in vars(stage):
        vars(stage)["pipe"] = pipe
    chosen = _choose_run(state, run, weights)
    before, state.directory = state.directory, chosen
    try:
        with pausing(state, stage._loop):
            # these hooks may create the models; within training, those of callbacks were called for its own stages
            users = (
                [] if state.is_running else [each for each in state.callbacks if type(each) is not PlanCheck]
            )
            state.run_hook_once("pre_run", pipe, users)
            state.run_hook_once("pre_stage", stage, users)
            yield _load(state, chosen, weights)
    finally:
        state.directory = before


def find_dataset(pipe: Pipeline, dataset: str | Iterable[Any]) -> Iterable[Any]:
    """Returns a registered dataset by its name, or the loader that was given."""
    if isinstance(dataset, str):
        return pipe.datasets[dataset]
    if not isinstance(dataset, Iterable):
        raise UsageError(
            f"a dataset of type {type(dataset).__name__} cannot be iterated over: pass a loader, such as "
            "hw.data.DataLoader(dataset, batch_size=64), or the name of a registered one"
        )
    return dataset


def _is_of_run(weights: EvalWeights) -> bool:
    return isinstance(weights, int) or weights in ("last", "best", "raw")


def _choose_run(state: RunState, given: Run | str | Path | None, weights: EvalWeights) -> Run:
    pipe, root = state.pipe, state.root
    if given is not None or state.directory is not None:
        found = given if given is not None else state.directory
        path = from_root(lambda: str(found.path if isinstance(found, Run) else _find_run(root, found).path))  # type: ignore[arg-type]
        return _opened(Path(path))

    def find() -> str | None:
        job = os.environ.get(environment.RUN)  # the run that the first pipeline of this job trains
        jobs = [Run.open(job)] if job and Path(job).absolute() not in current().opened_runs else []
        named = own_runs(runs_under(root, name=pipe.name))
        if not _is_of_run(weights):
            return next((str(run.path) for run in (*jobs, *named)), None)
        # the job may train another model than this pipeline
        return next((str(run.path) for run in (*named, *jobs) if newest_step(run.path) is not None), None)

    path_or_none = from_root(find)
    if path_or_none is not None:
        return _opened(Path(path_or_none))
    if _is_of_run(weights):
        raise UsageError(
            f"{root} has no run {pipe.name!r} with checkpoints: train one with pipe.enable_checkpointing(), or "
            'pass run=, weights=PATH, or weights="current" for the weights that the models have'
        )
    return pipe._choose().run


def _find_run(root: str | Path, place: str | Path) -> Run:
    """Returns the run at a path, or the one whose id ends with the text."""
    found = find_runs(place, root) if isinstance(place, str) else []
    return found[0] if len(found) == 1 else Run.open(place)


def _opened(path: Path) -> Run:
    return files.retry_until_visible(lambda: Run.open(path))


def _load(state: RunState, run: Run, weights: EvalWeights) -> EvalSession:
    """Loads the weights into all registered models."""
    pipe = state.pipe
    if not state.steps_done:
        state.begin_averages()  # the script may have loaded the weights after registration
    if weights == "current":
        identity: dict[str, Any] = {"source": "current", "unlike_others": secrets.token_hex(8)}
        averaged = [model.name for model in pipe.registered_models.values() if model.ema is not None]
        return EvalSession(
            run=run, source="current", identity=identity, step=state.steps_done, averaged=averaged
        )
    chosen = _choose_weights(run, weights, state.root)
    chosen = replace(chosen, source=chosen.locate(), at="last")
    path = Path(chosen.source)  # type: ignore[arg-type]
    try:
        # before the weights, so that newer ones have other stamps
        stamps = from_root(lambda: read_stamps(path))
        averaged = [model.name for model in pipe.registered_models.values() if _load_model(model, chosen)]
    except (NoValidCheckpoint, UsageError):
        if from_root(path.exists):
            raise
        return _load(state, run, weights)  # a process that trains the run has removed it: choose again
    identity = {"source": str(path), "files": stamps, "model": chosen.model, "averaged": averaged}
    name = path.name.removeprefix("step-")
    step = int(name) if name != path.name and name.isdigit() else None
    return EvalSession(run=run, source=str(path), identity=identity, step=step, averaged=averaged)


def _choose_weights(run: Run, weights: EvalWeights, root: str | Path) -> Weights:
    if isinstance(weights, int) or weights in ("last", "best"):
        return Weights(run, at=weights)  # type: ignore[arg-type]
    if weights == "raw":
        return Weights(run, ema=False)
    chosen = find_weights(weights, root)
    if isinstance(weights, str) and "/" not in weights and not from_root(lambda: chosen.path.exists()):
        raise UsageError(
            f'weights={weights!r} is not known: give "last", "best", "raw", "current", a step as a number, or a path'
        )
    return chosen


def _load_model(model: RegisteredModel, weights: Weights) -> bool:
    """Loads the weights that validations of their run used, or those of `weights.ema`; returns True for averages."""
    path = weights.path
    averaged = weights.ema
    if averaged is None:
        averaged = from_root(lambda: has_averages(weights, model.name, path))
    tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    swapped = model.ema is not None  # an evaluation swaps the average into the model
    first = replace(weights, ema=averaged and not swapped)
    load_weights(first, tensors, model=model.name, ties=model.ties)
    model.load_state_dict(tensors)
    if model.ema is None:
        return averaged
    values = tensors
    if averaged:
        values = {**tensors, **(model.average_state_dict() or {})}
        load_weights(replace(weights, ema=True), values, model=model.name, ties=model.ties)
    model.ema.load_state_dict(values)
    return averaged


@final
class EvalProgress:
    """Prints the progress of an evaluation on rank 0, every few seconds."""

    def __init__(self, what: str, total: int | None, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._printed = time.monotonic()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            of = "" if self._total is None else f" of {self._total:,}"
            report_root(f"{self._what}: {self._done:,}{of} batches")
