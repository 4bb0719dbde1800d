"""Settings as a run records them: a plain tree of dicts, lists, text, numbers, booleans and None.

    to_plain({"lr": 3e-4, "dtype": torch.bfloat16})  ->  {"lr": 0.0003, "dtype": "torch.bfloat16"}

Converts objects of numpy, torch and OmegaConf without importing these packages.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import functools
import re
import sys
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from enum import Enum
from pathlib import PurePath

import yaml

from headway.errors import UsageError

_AS_TEXT = (
    PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    decimal.Decimal,
    complex,
    range,
)
_CALLABLE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NAMESPACE = (argparse.Namespace, types.SimpleNamespace)
_LARGEST_ARRAY = 1000  # elements; a larger array is data, not a setting


def to_plain(config: object) -> dict[str, object]:
    """Converts settings to a plain tree, with every reference resolved; `None` gives an empty one.

    Accepts a dict, a dataclass, an OmegaConf config or an argparse namespace. Paths, enum members and dtypes
    become text, sets sorted lists, functions and classes "module:qualname". Anything else is a `UsageError`
    that names its place.

    >>> to_plain({"data": {"root": PurePath("/data"), "sizes": (224, 96)}, "loss": max})
    {'data': {'root': '/data', 'sizes': [224, 96]}, 'loss': 'builtins:max'}
    """
    tree = {} if config is None else _simpler(config, at="config")
    if not isinstance(tree, Mapping):
        kind = type(config).__name__
        raise UsageError(
            f"config must be a dict, a dataclass or an OmegaConf config, not {kind}: {config!r:.80}"
        )
    return _plain_mapping(tree, at="config", inside=(id(config),))


def leaves(tree: object, inside: str = "") -> Iterator[tuple[str, object]]:
    """Yields the single settings of a plain tree with their full names.

    >>> dict(leaves({"model": {"depth": 2, "heads": {}}, "lr": 0.1}))
    {'model.depth': 2, 'model.heads': {}, 'lr': 0.1}
    """
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", value


def to_yaml(plain: object) -> str:
    """Returns the tree as YAML, in its own order.

    >>> print(to_yaml({"lr": 0.001, "layers": [2, 4]}), end="")
    lr: 0.001
    layers:
    - 2
    - 4
    """
    text = str(yaml.safe_dump(plain, sort_keys=False, width=110, allow_unicode=True))
    # PyYAML reads these rare line breaks back correctly only if they are escaped
    if re.search("[\x85\u2028\u2029]", text):
        text = str(yaml.safe_dump(plain, sort_keys=False, width=110))
    return text


def is_yaml(text: str) -> bool:
    """Returns whether a text looks like undamaged output of `to_yaml` for settings.

    >>> is_yaml("lr: 0.001\\n"), is_yaml(""), is_yaml("lr: [0.0")
    (True, False, False)
    """
    try:
        return bool(text.strip()) and not isinstance(yaml.safe_load(text), str)
    except yaml.YAMLError:
        return False


def _plain(value: object, *, at: str, inside: tuple[int, ...]) -> object:
    """Converts one node of the tree: `at` is its path for messages, `inside` the ids of the objects that contain it."""
    if id(value) in inside:
        raise UsageError(f"{at} contains itself; settings must be a tree")
    inside = (*inside, id(value))
    value = _simpler(value, at=at)
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)  # YAML writes these types, but not their subclasses
    if isinstance(value, Mapping):
        return _plain_mapping(value, at=at, inside=inside)
    if isinstance(value, AbstractSet):
        return _in_order(_plain(item, at=f"{at}{{{item!r:.40}}}", inside=inside) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, at=f"{at}[{index}]", inside=inside) for index, item in enumerate(value)]
    raise UsageError(
        f"{at} is a {type(value).__name__}, which cannot be written to a settings file; "
        "give text, numbers, lists, dicts or dataclasses"
    )


def _plain_mapping(
    mapping: Mapping[object, object], *, at: str, inside: tuple[int, ...]
) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, item in mapping.items():
        name = _simpler(key, at=at)
        if name is not None and not isinstance(name, str | bool | int | float):
            raise UsageError(f"{at} has the key {key!r:.80}; give text or numbers as keys")
        if str(name) in plain:
            raise UsageError(f"{at} has two keys that are both written {str(name)!r}; rename one")
        plain[str(name)] = _plain(item, at=f"{at}.{name}", inside=inside)
    return plain


def _simpler(value: object, *, at: str) -> object:
    """Converts the outer level of a value to builtin types; a value without a simpler form is returned as it is."""
    if isinstance(value, Enum):
        return value.name or str(value.value)
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, _CALLABLE):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, _NAMESPACE):
        return vars(value)
    if isinstance(value, functools.partial):
        return {"call": value.func, "args": value.args, "kwargs": value.keywords}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return _foreign(value, at=at)


def _foreign(value: object, *, at: str) -> object:
    """Converts objects of other packages. A package with objects here has been imported already."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf and isinstance(value, omegaconf.DictConfig | omegaconf.ListConfig):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise UsageError(f"{at}.{error.full_key} has no value: {str(error).splitlines()[0]}") from error
    if torch := sys.modules.get("torch"):
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.Tensor) and value.numel() <= _LARGEST_ARRAY:
            return value.tolist()
    if numpy := sys.modules.get("numpy"):
        if isinstance(value, numpy.dtype):
            return str(value)
        if isinstance(value, numpy.generic | numpy.ndarray) and value.size <= _LARGEST_ARRAY:
            return value.tolist()
    return value


def _in_order(items: Iterable[object]) -> list[object]:
    """Sorts the items of a set, so that equal settings give equal files."""
    return sorted(
        items,
        key=lambda item: (
            isinstance(item, str),
            item if isinstance(item, int | float | str) else 0,
            repr(item),
        ),
    )
