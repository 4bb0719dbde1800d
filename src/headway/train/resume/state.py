"""All that a pipeline must remember, under names that do not depend on ranks, wrappers or the order of registration.

Tensors stay where they are, whole or sharded; all else is plain values. `contribution` is the part that one rank
brings to a checkpoint: shards are everybody's, what DDP keeps equal is written by whoever has time, and the rest is
rank 0's word: buffers (DDP takes them from rank 0 anyway), models that nobody averages, counters, histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.checkpoint.format import dtypes
from headway.checkpoint.format.directory import CheckpointDirectory
from headway.checkpoint.format.manifest import read_index, read_manifest
from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline


@runtime_checkable
class StatefulObject(Protocol):
    """What `register_state` takes, and what a loader with a position of its own is."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def gather(pipe: Pipeline) -> dict[str, Any]:
    """The whole state, as this rank sees it."""
    names = parameter_names(pipe)
    return {
        "models": {name: model.bare.state_dict() for name, model in pipe.registered_models.items()},
        "averages": {
            name: model.ema.state_dict()
            for name, model in pipe.registered_models.items()
            if model.ema is not None
        },
        "optimizers": {name: _by_name(optimizer, names) for name, optimizer in pipe.optimizers.items()},
        "schedulers": {name: scheduler.state_dict() for name, scheduler in pipe.schedulers.items()},
        "stages": {stage.name: stage._loop.state_dict() for stage in pipe.stages},
        "history": pipe.history.state_dict(),
        "registered": {name: each.state_dict() for name, each in pipe._registered_state.items()},
        "progress": {"step": pipe.steps_done, "epoch": pipe.epoch},
    }


def restore(pipe: Pipeline, state: Mapping[str, Any]) -> None:
    """Puts back what `gather` gave, into a pipeline with the same names registered."""
    for kind, there in {
        "models": pipe.registered_models,
        "averages": [name for name, model in pipe.registered_models.items() if model.ema is not None],
        "optimizers": pipe.optimizers,
        "schedulers": pipe.schedulers,
        "stages": [stage.name for stage in pipe.stages],
        "registered": pipe._registered_state,
    }.items():
        _check_names(kind, there, state[kind])
    names = parameter_names(pipe)
    for name, model in pipe.registered_models.items():
        model.bare.load_state_dict(state["models"][name])
        if model.ema is not None:
            model.ema.load_state_dict(state["averages"][name])
    for name, optimizer in pipe.optimizers.items():
        _load_by_name(name, optimizer, names, state["optimizers"][name])
    for name, scheduler in pipe.schedulers.items():
        scheduler.load_state_dict(state["schedulers"][name])
    for stage in pipe.stages:
        stage._loop.load_state_dict(state["stages"][stage.name])
    for name, each in pipe._registered_state.items():
        each.load_state_dict(state["registered"][name])
    pipe.history.load_state_dict(state["history"])
    pipe.steps_done, pipe.epoch = state["progress"]["step"], state["progress"]["epoch"]


def contribution(pipe: Pipeline, state: dict[str, Any]) -> dict[str, Any]:
    """What this rank brings to the checkpoint of all."""
    if pipe.world.rank == 0:
        return state
    equal = {
        id(p) for model in pipe.registered_models.values() if model.synced for p in model.bare.parameters()
    }
    names = parameter_names(pipe)
    kept = {names[key] for key in equal}

    def brings(name: str, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor) or name in kept

    models = {
        kind: {
            model: {
                key: t for key, t in tensors.items() if isinstance(t, Tensor) and brings(f"{model}.{key}", t)
            }
            for model, tensors in state[kind].items()
        }
        for kind in ("models", "averages")
    }
    optimizers = {
        name: {
            "state": {
                parameter: {k: v for k, v in values.items() if isinstance(v, Tensor) and brings(parameter, v)}
                for parameter, values in optimizer["state"].items()
            }
        }
        for name, optimizer in state["optimizers"].items()
    }
    return {**models, "optimizers": optimizers}


def destinations(pipe: Pipeline, path: Path) -> dict[str, Any]:
    """What a checkpoint is to be loaded into: each rank reads only its shards; the rest comes as the files have it."""
    wanted = dict.fromkeys(("schedulers", "stages", "history", "registered", "progress", "run"))
    models = {name: model.bare.state_dict() for name, model in pipe.registered_models.items()}
    averages = {
        name: model.ema.state_dict()
        for name, model in pipe.registered_models.items()
        if model.ema is not None
    }
    return {**wanted, "models": models, "averages": averages, "optimizers": _optimizer_shards(pipe, path)}


def _optimizer_shards(pipe: Pipeline, path: Path) -> dict[str, Any]:
    """A fresh optimizer has no state yet: for sharded parameters it is made here, sharded like them, as saved."""
    names = parameter_names(pipe)
    shards: dict[str, Any] = {}
    sharded = {
        f"optimizers.{name}.state.{names[id(p)]}": (name, names[id(p)], p)
        for name, optimizer in pipe.optimizers.items()
        for group in optimizer.param_groups
        for p in group["params"]
        if isinstance(p, DTensor)
    }
    if not sharded:
        return shards
    with CheckpointDirectory(path) as directory:
        entries = read_index(directory, read_manifest(directory))
    for entry_name, entry in entries.items():
        prefix, _, key = entry_name.rpartition(".")
        if prefix not in sharded:
            continue
        optimizer, parameter, weight = sharded[prefix]
        if entry.shape == tuple(weight.shape):
            made = torch.zeros_like(weight.detach(), dtype=dtypes.BY_NAME[entry.dtype])
            shards.setdefault(optimizer, {"state": {}})["state"].setdefault(parameter, {})[key] = made
    return shards


def parameter_names(pipe: Pipeline) -> dict[int, str]:
    """The name of each parameter, by its id: "net.first.weight"."""
    return {
        id(parameter): f"{name}.{key}"
        for name, model in pipe.registered_models.items()
        for key, parameter in model.bare.named_parameters()
    }


def _by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's state with names in the place of numbers."""
    packed, order = optimizer.state_dict(), _order(optimizer, names)
    return {
        "state": {order[number]: values for number, values in packed["state"].items()},
        "groups": [
            group | {"params": [order[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }


def _load_by_name(
    name: str, optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any]
) -> None:
    order = _order(optimizer, names)
    saved = [group["params"] for group in state["groups"]]
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if saved != here:
        odd = {key for group in saved for key in group} ^ set(order)
        what = f"one has {min(odd)!r} and the other does not" if odd else "they are in other groups"
        raise UsageError(
            f"optimizer {name!r} was saved with other parameters than it has now: {what}; make it as it was, or "
            'start a new run with resume="never"'
        )
    number = {key: index for index, key in enumerate(order)}
    numbered = {
        "state": {number[key]: values for key, values in state["state"].items()},
        "param_groups": [
            group | {"params": [number[key] for key in group["params"]]} for group in state["groups"]
        ],
    }
    try:
        optimizer.load_state_dict(numbered)
        # torch has added by now what its newer versions have
        missing = [key for key in optimizer.defaults if any(key not in g for g in optimizer.param_groups)]
    except KeyError as error:
        missing = [str(error.args[0])]
    if missing:
        raise UsageError(
            f"optimizer {name!r} was saved without {missing[0]!r}, so by another kind of optimizer: make it as it was, "
            'or start a new run with resume="never"'
        )


def _order(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """The parameters' names in the order in which torch numbers them."""
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _check_names(kind: str, here: Any, there: Mapping[str, Any]) -> None:
    if set(here) != set(there):
        raise UsageError(
            f"the checkpoint has {kind} {', '.join(sorted(there)) or 'none'}, and the pipeline has "
            f"{', '.join(sorted(here)) or 'none'}: register what was registered when the run began, or start a new "
            'run with resume="never"'
        )
