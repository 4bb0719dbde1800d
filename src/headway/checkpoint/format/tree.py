"""A state as a JSON tree beside a flat table of tensors, converted back without loss.

Values that JSON does not have become an object with one marked key: a tensor is {"$tensor": name}, and so on for a
tuple, a dict with keys that are not strings, a Counter (schedulers have them) and a float that is not finite. Any other
type is refused: a checkpoint holds only values that can be read without executing code. To read one needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.directory import DamagedCheckpoint
from headway.checkpoint.format.manifest import STATE
from headway.errors import UsageError

if TYPE_CHECKING:
    import torch

_DEEPEST = 100
"""levels of a state: each takes some frames of Python's stack, on which a thousand fit"""
_SCALARS = (str, int, float, bool, type(None))


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Splits a state into JSON, with marks in place of the tensors, and the tensors by name.

    >>> split({"net": {"weight": torch.ones(1)}, "epoch": 3})
    ({'net': {'weight': {'$tensor': 'net.weight'}}, 'epoch': 3}, {'net.weight': tensor([1.])})
    """
    if not all(type(part) is str and part and not part.startswith("$") for part in state):
        raise UsageError(f"the parts of a state need names that do not begin with '$': {list(state)!r:.200}")
    tensors: dict[str, torch.Tensor] = {}
    return {part: _pack(value, part, tensors) for part, value in state.items()}, tensors


def check(tree: object, tensors: Mapping[str, object]) -> None:
    """Raises `DamagedCheckpoint` unless a tree is a state, whose tensors have these names, that `join` restores."""
    if not isinstance(tree, dict) or any(part.startswith("$") for part in tree):
        raise DamagedCheckpoint(f"{STATE}: it is not a state")
    join(tree, tensors)


def join(tree: object, tensors: Mapping[str, object], *, file: str = STATE) -> Any:
    """Restores the state from the two results of `split`; `file` is where the tree was read, for messages."""

    def inner(tree: object, depth: int) -> Any:
        if depth > _DEEPEST:
            raise DamagedCheckpoint(f"{file}: it is nested too deeply")
        depth += 1
        match tree:
            case list():
                return [inner(value, depth) for value in tree]
            case {"$tensor": str(name), **rest} if not rest and name in tensors:
                return tensors[name]
            case {"$tuple": list(values), **rest} if not rest:
                return tuple(inner(value, depth) for value in values)
            case {"$dict": list(pairs), **rest} if not rest and _are_pairs(pairs):
                return {key: inner(value, depth) for key, value in pairs}
            case {"$counter": list(pairs), **rest} if not rest and _are_pairs(pairs):
                return Counter({key: inner(value, depth) for key, value in pairs})
            case {"$float": "nan" | "inf" | "-inf" as text, **rest} if not rest:
                return float(text)
            case dict() if not any(key.startswith("$") for key in tree):
                return {key: inner(value, depth) for key, value in tree.items()}
            case dict():
                raise DamagedCheckpoint(
                    f"{file}: an object with {next(iter(tree))!r:.100} is not a known mark"
                )
        return tree

    return inner(tree, 0)


def names_in(tree: object) -> list[str]:
    """Returns the names of all tensors in a tree, in order."""
    match tree:
        case {"$tensor": str(name)}:
            return [name]
        case dict():
            return [name for value in tree.values() for name in names_in(value)]
        case list():
            return [name for value in tree for name in names_in(value)]
    return []


def merge(trees: list[Any], path: str = "") -> Any:
    """Merges the trees of all ranks. Ranks may have different keys; values of the same key must be equal."""
    first = trees[0]
    if all(tree == first for tree in trees[1:]):
        return first
    if all(type(tree) is dict and tree.keys() == {"$dict"} for tree in trees):
        merged = [dict(tree["$dict"]) for tree in trees]
        keys = dict.fromkeys(key for pairs in merged for key in pairs)
        return {
            "$dict": [[key, merge([p[key] for p in merged if key in p], f"{path}.{key}")] for key in keys]
        }
    if not all(type(tree) is dict and not any(key.startswith("$") for key in tree) for tree in trees):
        raise UsageError(
            f"the ranks disagree about {path!r} (one has {str(first)!r:.80}): pass what belongs to one rank as local=, "
            "and make the rest equal on all ranks"
        )
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {
        key: merge([tree[key] for tree in trees if key in tree], f"{path}.{key}".lstrip(".")) for key in keys
    }


def to_json(value: object, path: str) -> Any:
    """Converts a value without tensors to JSON."""
    tensors: dict[str, torch.Tensor] = {}
    packed = _pack(value, path, tensors)
    if tensors:
        raise UsageError(f"{next(iter(tensors))!r} is a tensor: local= must be JSON")
    return packed


def _pack(value: object, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise UsageError(
                f"two tensors of the state have the same name {path!r}: rename one of their keys"
            )
        tensors[path] = value
        return {"$tensor": path}
    if type(value) in _SCALARS:
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        return value
    if depth > _DEEPEST:
        raise UsageError(f"{path!r:.100} is nested too deeply, or contains itself: save it with fewer levels")
    if type(value) is list:
        return [_pack(item, f"{path}.{number}", tensors, depth + 1) for number, item in enumerate(value)]
    if type(value) is tuple:
        return {
            "$tuple": [
                _pack(item, f"{path}.{number}", tensors, depth + 1) for number, item in enumerate(value)
            ]
        }
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return _pack_dict(value, path, tensors, depth + 1)
    raise UsageError(
        f"{path!r} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "convert it to tensors, dicts, lists, tuples, strings, numbers, True, False or None"
    )


def _pack_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise UsageError(
                f"{path!r} has the key {key!r:.80}: the keys of a state must be strings or integers"
            )
    packed = [[key, _pack(item, f"{path}.{key}", tensors, depth)] for key, item in value.items()]
    if type(value) is Counter:
        return {"$counter": packed}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(packed)
    return {"$dict": packed}


def _are_pairs(pairs: list[Any]) -> bool:
    return all(type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int) for pair in pairs)
