"""The state of any optimizer, as its `state_dict()` returns it, with the names of parameters instead of their numbers.

torch's `load_state_dict` casts state to the dtype of the parameter, and replaces the groups and the state by other
objects. After it, `load` puts back what was saved, into the objects that the script, its schedulers and optimizers
around this one may hold.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, zeros
from torch.optim import Optimizer

from headway.checkpoint.write import comparison
from headway.errors import UsageError

STRAY = (
    "has parameters that no model has anymore: a hook that rebuilds a model for export, such as a merge of adapters, "
    "belongs in post_run"
)
_AS_SAVED = 'create it as in the saved run, or start a new run with resume="never"'
_STATE, _GROUPS = "state", "param_groups"
_COMPARED_ELEMENTS = 1 << 20
"""elements of tensors that are compared between ranks: what an optimizer computes of its own is small"""

Names = Mapping[int, str]
"""the names of parameters by the ids of the objects"""


def find_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the parameters in the order in which torch numbers them."""
    return (p for group in optimizer.param_groups for p in group["params"])


def is_stray(optimizer: Optimizer, names: Names) -> bool:
    """Whether an optimizer has parameters that no model has: a hook may have replaced them in the model."""
    return any(id(p) not in names for p in find_parameters(optimizer))


def pack(name: str, optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Returns the optimizer's state under the names of parameters; "other" has all that is not of one parameter."""
    if is_stray(optimizer, names):
        raise UsageError(f"optimizer {name!r} {STRAY}")
    try:
        packed = optimizer.state_dict()
    except KeyError as error:
        ids = {id(p) for p in find_parameters(optimizer)}
        if not any(isinstance(key, Tensor) and id(key) not in ids for key in optimizer.state):
            raise
        raise UsageError(
            f"optimizer {name!r} has state of a parameter that is in none of its groups: delete it from "
            "optimizer.state where the parameter is replaced"
        ) from error
    _check_keys(name, packed, {id(p) for p in find_parameters(optimizer)})
    order = [names[id(p)] for p in find_parameters(optimizer)]
    groups = packed.get(_GROUPS, optimizer.param_groups)
    state: Mapping[Any, Any] = packed.get(_STATE, {})
    numbered = {number: values for number, values in state.items() if _is_number(number, order)}
    found: dict[str, Any] = {
        "state": {order[number]: values for number, values in numbered.items()},
        "keyed": {key: values for key, values in state.items() if key not in numbered},
        "other": {key: value for key, value in packed.items() if key not in (_STATE, _GROUPS)},
    }
    return found | {
        "class": type(optimizer).__qualname__,
        "groups": [
            {**group, "params": [names[id(p)] for p in own["params"]]}
            for group, own in zip(groups, optimizer.param_groups, strict=True)
        ],
        "placements": {
            path: [_describe_placement(name, path, each) for each in value.placements]
            for part, values in found.items()
            for path, value in _leaves(values, part)
            if isinstance(value, DTensor)
        },
    }


def load(optimizer: Optimizer, names: Names, saved: Mapping[str, Any]) -> None:
    """Restores the result of `pack` into an optimizer with the same groups, see `match_groups`."""
    number = {names[id(p)]: index for index, p in enumerate(find_parameters(optimizer))}
    groups = [
        {**own, **group, "params": [number[key] for key in group["params"]]}
        for own, group in zip(optimizer.param_groups, saved["groups"], strict=True)
    ]
    state = {number[key]: values for key, values in saved["state"].items()} | saved["keyed"]
    given = {_STATE: state, _GROUPS: groups, **saved["other"]}
    with _keeping_objects(optimizer), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # what torch casts is put back
        optimizer.load_state_dict(_copy_containers(given))
    _put_back(optimizer.state_dict(), {key: value for key, value in given.items() if key != _GROUPS})


def check_class(name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises `UsageError` if another class of optimizer was saved: torch silently loads AdamW into Adam."""
    if (before := saved["class"]) != (here := type(optimizer).__qualname__):
        raise UsageError(f"optimizer {name!r} was saved as {before} and is now {here}: {_AS_SAVED}")


def match_groups(
    name: str, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> list[str]:
    """Brings the groups of an optimizer into the order of the checkpoint, and adds those that it lacks.

    A hook may have added them in an earlier epoch, to unfreeze layers one by one. Returns the parameters in groups that
    are not the script's.
    """
    names = {id(p): key for key, p in parameters.items()}
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    wanted: list[list[str]] = [group["params"] for group in saved["groups"]]
    ours = {key for group in here for key in group}
    theirs = {key for group in wanted for key in group}
    if odd := (ours - theirs) | (theirs - parameters.keys()):
        raise UsageError(
            f"optimizer {name!r} and the checkpoint have different parameters (only one of them has {min(odd)!r}): "
            f"{_AS_SAVED}"
        )
    added = list[str]()
    by_names = {frozenset(keys): group for keys, group in zip(here, optimizer.param_groups, strict=True)}
    of_parameter = {
        key: group for keys, group in zip(here, optimizer.param_groups, strict=True) for key in keys
    }
    groups = list[dict[str, Any]]()
    for keys, stored in zip(wanted, saved["groups"], strict=True):
        params = [parameters[key] for key in keys]
        if (group := by_names.get(frozenset(keys))) is None:
            added += keys
            if ours.isdisjoint(keys):
                optimizer.add_param_group({**stored, "params": params})
                group = optimizer.param_groups[-1]
            else:
                group = copy(of_parameter[next(key for key in keys if key in ours)])
        group["params"] = params
        groups.append(group)
    optimizer.param_groups[:] = groups
    return added


def contribution(state: Mapping[str, Any], whole: Set[str]) -> dict[str, Any]:
    """Returns what ranks other than 0 add to an optimizer's state: shards, and state of the parameters in `whole`."""
    per_parameter = {key: _select(values, whole=key in whole) for key, values in state["state"].items()}
    others = {part: _select(state[part], whole=False) for part in ("other", "keyed")}
    parts = {"state": {key: values for key, values in per_parameter.items() if values}, **others}
    return {part: values for part, values in parts.items() if values}


def fingerprints(packed: Mapping[str, Any], synced: Set[str]) -> dict[str, int]:
    """Returns a number for each value and small tensor that must be equal on all ranks, by path.

    `synced` are the parameters that all ranks train with the same gradients. An optimizer that has others may have
    other settings on each rank, too.
    """
    parts: dict[str, Any] = {"state": {key: each for key, each in packed["state"].items() if key in synced}}
    if all(key in synced for group in packed["groups"] for key in group["params"]):
        parts |= {key: packed[key] for key in ("keyed", "other", "groups")}
    return {
        path: zlib.crc32(repr(comparison.describe(value)).encode())
        for part, values in parts.items()
        for path, value in _leaves(values, part)
        if not isinstance(value, Tensor)
        or (not isinstance(value, DTensor) and value.numel() <= _COMPARED_ELEMENTS)
    }


def empty_shards(
    parameters: Mapping[str, Tensor],
    placements: Mapping[str, Sequence[str]],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> dict[str, DTensor]:
    """Returns empty tensors for the sharded state of an optimizer, by path, since a new optimizer has none.

    `placements` are those that `pack` noted, `tensors` the dtypes and shapes of all that was saved. State with the
    shape of its parameter is sharded as the parameter is now.
    """
    sharded = {f"state.{key}": p for key, p in parameters.items() if isinstance(p, DTensor)}
    made: dict[str, DTensor] = {}
    for path, (dtype, shape) in tensors.items() if sharded else ():
        prefix = path
        while prefix and prefix not in sharded:
            prefix = prefix.rpartition(".")[0]
        weight = sharded.get(prefix)
        if weight is not None and shape == tuple(weight.shape):
            made[path] = torch.zeros_like(weight.detach(), dtype=dtype)  # type: ignore[assignment]
        elif path in placements:
            mesh = (weight if weight is not None else next(iter(sharded.values()))).device_mesh
            made[path] = zeros(
                shape, dtype=dtype, device_mesh=mesh, placements=_placements(placements[path], mesh.ndim)
            )
    return made


def _describe_placement(name: str, path: str, placement: Placement) -> str:
    if isinstance(placement, Partial):
        raise UsageError(
            f"optimizer {name!r} keeps {path!r} as a sum over ranks that is not computed yet, which a checkpoint "
            "cannot hold: redistribute it in step()"
        )
    return str(placement.dim) if isinstance(placement, Shard) else ""


def _placements(dims: Sequence[str], ndim: int) -> list[Placement]:
    """Returns the placements that `_describe_placement` has described; whole tensors in another layout of ranks."""
    if len(dims) != ndim:
        return [Replicate()] * ndim
    return [Shard(int(dim)) if dim else Replicate() for dim in dims]


def _check_keys(name: str, state: object, ids: Set[int]) -> None:
    """Raises `UsageError` for a key that no other process has."""
    if isinstance(state, dict):
        for key, value in state.items():
            if isinstance(key, Tensor) or (type(key) is int and key in ids):
                raise UsageError(
                    f"optimizer {name!r} saves state under the id() of a parameter, or the parameter itself, which no "
                    "other process has: use its number, as torch.optim.Optimizer.state_dict() does"
                )
            _check_keys(name, value, ids)
    elif isinstance(state, list | tuple):
        for value in state:
            _check_keys(name, value, ids)


def _is_number(key: object, order: Sequence[str]) -> bool:
    """Whether a key is the number of a parameter, as torch counts them."""
    return type(key) is int and 0 <= key < len(order)


def _leaves(state: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _leaves(value, f"{path}.{number}")
    else:
        yield path, state


def _select(value: Any, *, whole: bool) -> Any:
    """Returns the shards in a state, and with `whole` all of its tensors; lists stay whole, so that ranks agree."""
    if isinstance(value, dict):
        parts = {key: _select(part, whole=whole) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(value, list | tuple):
        has_shards = any(isinstance(leaf, DTensor) for _, leaf in _leaves(value, ""))
        return value if has_shards else None
    return value if isinstance(value, DTensor) or (whole and isinstance(value, Tensor)) else None


# --- what the script holds


def _nested(optimizer: Optimizer, known: tuple[Optimizer, ...] = ()) -> tuple[Optimizer, ...]:
    """Returns an optimizer and those in its attributes, with which it may share groups and state."""
    known = (*known, optimizer)
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and not any(value is each for each in known):
            known = _nested(value, known)
    return known


@contextmanager
def _keeping_objects(optimizer: Optimizer) -> Iterator[None]:
    """Moves what was loaded into the groups and the dict of states from before."""
    before = [
        (each, each.state, each.param_groups, list(each.param_groups))
        for each in _nested(optimizer)
        if {_STATE, _GROUPS} <= vars(each).keys()
    ]
    yield
    for each, state, groups, members in before:
        for old, new in zip(members, each.param_groups, strict=True):
            if old is not new:
                _update_group(old, new)
        groups[:] = members
        each.param_groups = groups
        if (now := each.state) is not state:
            loaded = dict(now)
            state.clear()
            state.update(loaded)
            each.state = state


@torch.no_grad()
def _update_group(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        was = old.get(key)
        if key == "params":
            continue
        if not (isinstance(value, Tensor) and isinstance(was, Tensor)):
            old[key] = value
        elif (was.dtype, was.shape) == (value.dtype, value.shape):
            was.copy_(value)  # a learning rate that the script holds, or that groups share
        else:
            old[key] = value.to(was.device)


def _copy_containers(state: Any) -> Any:
    """Copies a state, but not its tensors: what loads it may keep the dicts that it is given, and change them."""
    if isinstance(state, dict):
        return {key: _copy_containers(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_copy_containers, state))
    return state


def _put_back(live: Any, saved: Any) -> Any:
    """Returns the saved value, in the containers of the live state as far as they are equal.

    torch casts tensors to the dtype of their parameter, and makes a generator's description of a string.
    """
    if isinstance(saved, Tensor):
        if not isinstance(live, Tensor):
            return saved
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(saved, dict) and isinstance(live, dict):
        for key, value in saved.items():
            live[key] = _put_back(live.get(key), value)
        return live
    if isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        live[:] = map(_put_back, live, saved)
        return live
    if isinstance(saved, tuple) and isinstance(live, tuple) and len(saved) == len(live):
        return tuple(map(_put_back, live, saved))
    return live if type(live) is type(saved) and live == saved else _copy_containers(saved)
