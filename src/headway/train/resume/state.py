"""The state of a pipeline, under names that do not depend on ranks, wrappers or the order of registration.

Tensors stay on their devices, whole or sharded; all else is plain values. `contribution` is the part that one rank adds
to a checkpoint. Each rank contributes its shards. All ranks contribute parameters that DDP keeps equal, to divide the
writing. All else comes from rank 0: buffers (DDP broadcasts them from rank 0 anyway), models without gradient sync,
counters, histories.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.checkpoint.format import dtypes
from headway.checkpoint.format.directory import CheckpointDirectory
from headway.checkpoint.format.manifest import STATE, read_document, read_index, read_manifest
from headway.checkpoint.write import comparison
from headway.data.fingerprint import fingerprints
from headway.dist.collective.exchange import gather_rows
from headway.errors import HeadwayError, UsageError
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.metrics.epoch_metrics import load_metric_state, metric_state
from headway.train.model.initial_weights import adapter_config, adapter_name, is_adapted
from headway.train.resume import modules, optimizers, rank_states

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.run_state import RunState


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""integers as wide as the elements of a tensor, by bytes"""


@runtime_checkable
class StatefulObject(Protocol):
    """An object whose state can be saved: for `register_state`, or a loader that can save its position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def gather(run: RunState) -> dict[str, Any]:
    """Returns the whole state as it is on this rank."""
    pipe, names = run.pipe, parameter_names(run.pipe)
    for stage in run.stage_states:
        stage.settle()
    return {
        **_model_states(pipe),
        "modules": {name: modules.pack(model.bare) for name, model in pipe.registered_models.items()},
        "optimizers": {
            name: optimizers.pack(name, optimizer, names) for name, optimizer in pipe.optimizers.items()
        },
        "schedulers": {name: scheduler.state_dict() for name, scheduler in pipe.schedulers.items()},
        "stages": {stage.name: stage.state_dict() for stage in run.stage_states},
        "history": pipe.history.state_dict(),
        "registered": {name: metric_state(each) for name, each in run.registered_state.items()},
        "rank_states": dict.fromkeys(run.rank_states, pipe.world.world_size),
        **rank_states.gather(run.rank_states, pipe.world.rank),
        "progress": {"step": run.steps_done, "epoch": run.epoch},
    }


def _model_states(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """Returns the state of each model, and of the average of its weights if it has one."""
    models = pipe.registered_models.items()
    averages = {
        name: average for name, model in models if (average := model.average_state_dict()) is not None
    }
    return {"models": {name: model.state_dict() for name, model in models}, "averages": averages}


POSITION = ("stages", "history", "progress")
"""the parts of a state that hooks need, before the rest is restored"""
_COMPARED = {
    "models": "model",
    "averages": "average of model",
    "modules": "model",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "registered": "state",
}


def restore_position(run: RunState, state: Mapping[str, Any]) -> None:
    """Restores the progress of the run and its stages, and the history."""
    _restore_progress(run, state)
    run.pipe.history.load_state_dict(state["history"])


def _restore_progress(run: RunState, state: Mapping[str, Any]) -> None:
    _check_names("stages", [stage.name for stage in run.pipe.stages], state["stages"])
    for stage in run.stage_states:
        with loading("stage", stage.name):
            stage.load_state_dict(state["stages"][stage.name])
    run.steps_done, run.epoch = state["progress"]["step"], state["progress"]["epoch"]


def restore(run: RunState, state: Mapping[str, Any]) -> None:
    """Restores the result of `gather`, but the history, into a pipeline with the same names registered."""
    pipe = run.pipe
    for kind, known in {
        "models": pipe.registered_models,
        "averages": [name for name, model in pipe.registered_models.items() if model.ema is not None],
        "optimizers": pipe.optimizers,
        "schedulers": pipe.schedulers,
        "registered": run.registered_state,
        "rank_states": run.rank_states,
    }.items():
        _check_names(kind.replace("_", " "), known, state[kind])
    before = max(state["rank_states"].values(), default=0)
    rank_states.check_ranks(run.rank_states, before=before, now=pipe.world.world_size)
    _restore_progress(run, state)
    for name, model in pipe.registered_models.items():
        _check_tensors(name, model.state_dict(), state["models"][name])
        with loading("model", name):
            model.load_state_dict(state["models"][name])
            changed = modules.load(model.bare, state["modules"][name])
        if model.ema is not None:
            with loading("average of model", name):
                model.ema.load_state_dict(state["averages"][name])
        _report(pipe, f"model {name!r}: parameters are frozen and unfrozen as in the checkpoint", changed)
    _restore_optimizers(pipe, state["optimizers"])
    for name, scheduler in pipe.schedulers.items():
        with loading("scheduler", name):
            scheduler.load_state_dict(state["schedulers"][name])
    for name, each in run.registered_state.items():
        with loading("state", name):
            load_metric_state(each, state["registered"][name])
    with loading("rank states", ", ".join(run.rank_states)):
        rank_states.restore(run.rank_states, state, pipe.world.rank)


def describe(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `find_unequal` compares: take it before `restore`, since models are loaded in place."""
    return {kind: comparison.describe(state[kind]) for kind in _COMPARED}


def find_unequal(run: RunState, described: Mapping[str, Any]) -> str | None:
    """Returns the part whose state, after `restore`, is not the described one; None if all are equal."""
    now = describe(gather(run))
    for name, optimizer in described["optimizers"].items():
        here = now["optimizers"][name]
        here["placements"] = optimizer["placements"]  # of another number of ranks
        for group, saved in zip(here["groups"], optimizer["groups"], strict=True):
            for key in group.keys() - saved.keys():  # of a newer version of the optimizer
                del group[key]
    for kind, word in _COMPARED.items():
        for name, saved in described[kind].items():
            if (path := comparison.find_difference(saved, now[kind].get(name))) is not None:
                return f"{word} {name!r}: {path!r}" if path else f"{word} {name!r}"
    return None


def _report(pipe: Pipeline, what: str, names: Collection[str]) -> None:
    if names and pipe.world.is_root:
        logger.info(f"{what}, and not as in the script ({shorten_list(names)})")


def _restore_optimizers(pipe: Pipeline, saved: Mapping[str, Any]) -> None:
    names, parameters = parameter_names(pipe), named_parameters(pipe)
    for name, optimizer in pipe.optimizers.items():
        optimizers.check_class(name, optimizer, saved[name])
        with loading("optimizer", name):
            added = optimizers.match_groups(name, optimizer, parameters, saved[name])
            optimizers.load(optimizer, names, saved[name])
        _report(pipe, f"optimizer {name!r}: parameters are grouped as in the checkpoint", added)


def adapters(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """Returns the settings of the models' adapters, such as LoRA."""
    found = {name: adapter_config(model.bare) for name, model in pipe.registered_models.items()}
    return {name: config for name, config in found.items() if config is not None}


def adapter_names(pipe: Pipeline) -> dict[str, str]:
    """Returns the names of the models' adapters in peft, by model."""
    models = pipe.registered_models.items()
    return {name: adapter_name(model.bare) for name, model in models if is_adapted(model.bare)}


def compare_datasets(pipe: Pipeline, state: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    """Returns the fingerprints of the datasets; raises `UsageError` if the content of one has changed since the save.

    Only sources that both have are compared: the loader checks whether a mix may have others.
    """
    saved = state["run"].get("fingerprints", {}) if state else {}  # older checkpoints have none
    now = {name: fingerprints(loader) for name, loader in pipe.datasets.items()}
    for name, sources in now.items():
        then = saved.get(name)
        if not isinstance(then, Mapping):
            continue  # none, or an older format
        for source, digest in sources.items():
            if then.get(source, digest) != digest:
                where = f", in {source!r}" if source else ""
                raise UsageError(
                    f"dataset {name!r} is not the one that {pipe.directory.id} was trained on: it has other content"
                    f'{where}; restore it, or start a new run with resume="never"'
                )
    return now


def contribution(pipe: Pipeline, state: dict[str, Any], *, from_root: bool) -> dict[str, Any]:
    """Returns the part of the state that this rank adds to the common checkpoint; with `from_root`, only its shards."""
    if pipe.world.rank == 0:
        return state
    kept = set[str]() if from_root else synced_parameters(pipe)

    def contributes(name: str, value: object) -> bool:
        return isinstance(value, DTensor) or (isinstance(value, Tensor) and name in kept)

    models = {
        kind: {
            model: {key: value for key, value in values.items() if contributes(f"{model}.{key}", value)}
            for model, values in state[kind].items()
        }
        for kind in ("models", "averages")
    }
    steps = {name: optimizers.contribution(saved, kept) for name, saved in state["optimizers"].items()}
    own = rank_states.part_of(pipe.world.rank)
    return {**models, "optimizers": steps} | ({own: state[own]} if own in state else {})


def destinations(pipe: Pipeline, path: Path) -> dict[str, Any]:
    """Returns the destinations for loading a checkpoint: each rank reads only its shards, and all else as saved."""
    with CheckpointDirectory(path) as directory:
        manifest = read_manifest(directory)
        entries, tree = read_index(directory, manifest), read_document(directory, manifest, STATE)
    tensors = {name: (dtypes.BY_NAME[entry.dtype], entry.shape) for name, entry in entries.items()}
    for name, model in pipe.registered_models.items():
        if name in tree["modules"]:
            own = _below(tensors, f"models.{name}.")
            made = modules.make_buffers(model.bare, tree["modules"][name], own, pipe.device)
            _report(pipe, f"model {name!r}: buffers have the shapes of the checkpoint", made)
    plain = dict.fromkeys(("modules", "schedulers", *POSITION, "registered", "rank_states", "run"))
    world = pipe.world
    plain |= dict.fromkeys(
        rank_states.parts(tree["rank_states"], world.rank, before=manifest.world_size, now=world.world_size)
    )
    parameters = named_parameters(pipe)
    shards = {
        name: optimizers.empty_shards(parameters, saved["placements"], _below(tensors, f"optimizers.{name}."))
        for name, saved in tree["optimizers"].items()
        if any(isinstance(parameter, DTensor) for parameter in parameters.values())
    }
    return {**plain, **_model_states(pipe), "optimizers": shards}


def _below(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def named_parameters(pipe: Pipeline) -> dict[str, nn.Parameter]:
    """Returns the parameters of all models by name, such as "net.first.weight"."""
    return {
        f"{name}.{key}": parameter
        for name, model in pipe.registered_models.items()
        for key, parameter in model.bare.named_parameters()
    }


def synced_parameters(pipe: Pipeline) -> set[str]:
    """Returns the names of the parameters whose gradients are the same on all ranks."""
    names = parameter_names(pipe)
    synced = [model for model in pipe.registered_models.values() if model.synced]
    return {names[id(p)] for model in synced for p in model.bare.parameters()}


def parameter_names(pipe: Pipeline) -> dict[int, str]:
    """Returns the name of each parameter by the id of the object."""
    return {id(parameter): name for name, parameter in named_parameters(pipe).items()}


def _check_tensors(name: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises `UsageError` if a model lacks a saved tensor; a tensor that was not saved is refused when loading."""
    if gone := [key for key in saved if key not in here]:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise UsageError(
            f"the checkpoint has {gone[0]!r}{more}, which model {name!r} no longer has: build it as in the saved "
            'run, or start a new run with resume="never"'
        )


@contextmanager
def loading(kind: str, name: str) -> Iterator[None]:
    """Raises `UsageError` if an object refuses a saved state: no attempt with this script can succeed."""
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"{kind} {name!r} does not accept the state in the checkpoint ({reason:.200}): create it as in the saved "
            'run, or start a new run with resume="never"'
        ) from error


def _check_names(kind: str, known: Any, saved: Mapping[str, Any]) -> None:
    """Raises `UsageError` unless the pipeline has the names that were saved."""
    if set(known) != set(saved):
        raise UsageError(
            f"the checkpoint has {kind} {', '.join(sorted(saved)) or 'none'}, but the pipeline has "
            f"{', '.join(sorted(known)) or 'none'}: register the same names as in the saved run, or start a new run "
            'with resume="never"'
        )


def find_unsavable(pipe: Pipeline) -> tuple[str | None, bool]:
    """Returns the problem with saving the state after `post_stage`, and whether ranks differ; equal on all ranks.

    A hook may have rebuilt a model, or changed it on one rank only, but each rank writes a part of the parameters that
    DDP keeps equal. Takes one collective, with a fingerprint of each such model.
    """
    names = parameter_names(pipe)
    stray = [optimizers.is_stray(optimizer, names) for optimizer in pipe.optimizers.values()]
    synced = [name for name, model in pipe.registered_models.items() if model.synced]
    if not stray and not synced:
        return None, False
    marks = [0 if any(stray) else _fingerprint(pipe, name, set(names.values())) for name in synced]
    table = gather_rows(torch.tensor([*stray, *marks], dtype=torch.int64, device=pipe.device))
    for name, column in zip(pipe.optimizers, table.T, strict=False):
        if column.any():
            return f"optimizer {name!r} {optimizers.STRAY}", False
    for name, column in zip(synced, table.T[len(stray) :], strict=True):
        if (column != column[0]).any():
            return f"model {name!r} differs between ranks: change it on all ranks alike, or in post_run", True
    return None, False


def _fingerprint(pipe: Pipeline, name: str, names: Collection[str]) -> int:
    """Returns a number for the whole parameters of a model and their averages, independent of the summation order."""
    model, total = pipe.registered_models[name], torch.zeros((), dtype=torch.int64, device=pipe.device)
    for tensors in (model.state_dict(), model.average_state_dict() or {}):
        for key, tensor in tensors.items():
            if f"{name}.{key}" in names and isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
                kind = zlib.crc32(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                total += kind * (words.sum(dtype=torch.int64).to(pipe.device) + 1)
    return int(total)


def check_weights(run: RunState, *, from_root: bool) -> None:
    """Raises if weights are non-finite, or differ between ranks: such a checkpoint would replace a good one.

    With `from_root` they may differ, because rank 0 writes all of them.
    """
    pipe = run.pipe
    weights = [
        local
        for model in pipe.registered_models.values()
        for p in model.bare.parameters()
        if p.requires_grad and (local := p.to_local() if isinstance(p, DTensor) else p).numel()
    ]
    largest = torch._foreach_norm(weights, float("inf")) if weights else ()
    bad = [norm.to(pipe.device, torch.float32).isfinite().logical_not() for norm in largest]
    none = torch.zeros(1, dtype=torch.bool, device=pipe.device)  # of a rank to which FSDP has given no row
    synced = [name for name, model in pipe.registered_models.items() if model.synced and not from_root]
    names = set(parameter_names(pipe).values()) if synced else set()
    marks = torch.tensor([_fingerprint(pipe, name, names) for name in synced], device=pipe.device)
    table = gather_rows(torch.cat([torch.stack(bad).any(0, keepdim=True) if bad else none, marks]).long())
    if table[:, 0].any():
        raise HeadwayError(
            f"weights are non-finite after step {run.steps_done:,} and are not saved: lower the learning "
            "rate, set gradient_clip, or check the data, then resume from the previous checkpoint"
        )
    for name, column in zip(synced, table.T[1:], strict=True):
        if (column != column[0]).any():
            raise UsageError(
                f"model {name!r} differs between ranks after step {run.steps_done:,}, though their gradients are the "
                'same: change it on all ranks alike; if that draws random numbers, use hw.seed(..., scope="shared")'
            )
