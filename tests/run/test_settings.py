from __future__ import annotations

import argparse
import datetime
import functools
import math
import sys
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from omegaconf import OmegaConf

from headway.errors import UsageError
from headway.run.plain import leaves, to_plain, to_yaml


class Color(Enum):
    RED = object()


class Name(str):
    __slots__ = ()


class Access(IntFlag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)
    color: Color = Color.RED
    steps: int = field(default=3, init=False)
    names: set[str] = field(default_factory=lambda: {"b", "a"})


PLAIN = {
    "optim": {"lr": 1e-3, "betas": [0.9, 0.999]},
    "color": "RED",
    "steps": 3,
    "names": ["a", "b"],
}


def test_none_dict_dataclass_namespace() -> None:
    assert to_plain(None) == {}
    assert to_plain({"a": {"b": [1, (2, 3)]}}) == {"a": {"b": [1, [2, 3]]}}
    assert to_plain(Config()) == PLAIN
    assert to_plain(argparse.Namespace(lr=1, config=Config())) == {"lr": 1, "config": PLAIN}
    assert list(to_plain({"z": 1, "a": 2})) == ["z", "a"]


def test_omegaconf_is_resolved() -> None:
    config = OmegaConf.create({"dim": 4, "heads": "${dim}", "layers": [{"dim": "${dim}"}]})
    assert to_plain(config) == {"dim": 4, "heads": 4, "layers": [{"dim": 4}]}
    assert to_plain({"model": config, "list": config.layers})["model"] == {
        "dim": 4,
        "heads": 4,
        "layers": [{"dim": 4}],
    }
    structured = OmegaConf.structured(Optim)
    assert to_plain(structured) == {"lr": 1e-3, "betas": [0.9, 0.999]}


@pytest.mark.parametrize(
    ("broken", "names"),
    [
        ({"data": {"root": "???"}}, "config.data.root has no value"),
        ({"a": {"b": "${nowhere}"}}, "a.b has no value.*nowhere"),
    ],
)
def test_omegaconf_that_does_not_resolve(broken: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        to_plain(OmegaConf.create(broken))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("/a/b"), "/a/b"),
        (Color.RED, "RED"),
        (Access.READ | Access.WRITE, "READ|WRITE"),
        ({3, 20, 1}, [1, 3, 20]),
        (frozenset({"b", 2, (1, 2)}), [[1, 2], 2, "b"]),
        (range(3), "range(0, 3)"),
        (datetime.datetime(2026, 11, 15, 1, 2), "2026-11-15 01:02:00"),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (Name("digits"), "digits"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.dtype("float32"), "float32"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda:1"), "cuda:1"),
        (torch.Size([2, 3]), [2, 3]),
        (torch.channels_last, "torch.channels_last"),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.optim.AdamW, "torch.optim.adamw:AdamW"),
        (max, "builtins:max"),
        (
            functools.partial(torch.optim.AdamW, lr=0.1),
            {"call": "torch.optim.adamw:AdamW", "args": [], "kwargs": {"lr": 0.1}},
        ),
    ],
)
def test_values_that_are_not_plain(value: object, plain: object) -> None:
    made = to_plain({"x": value})
    assert made == {"x": plain}
    assert yaml.safe_load(to_yaml(made)) == made


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"a": {"b": [1, object()]}}, r"config\.a\.b\[1\] is a object"),
        ({"a": {"b": torch.nn.Linear(1, 1)}}, r"config\.a\.b is a Linear"),
        ({"a": torch.zeros(2000)}, r"config\.a is a Tensor"),
        ({"a": b"bytes"}, r"config\.a is a bytes"),
        ({"a": {(1, 2): 3}}, r"config\.a has the key \(1, 2\)"),
        ({"a": {1: "x", "1": "y"}}, r"config\.a has two keys that are both written '1'"),
        ([1, 2], "config must be a dict"),
        ("lr=3", "config must be a dict"),
        (Config, "config must be a dict"),
    ],
)
def test_what_cannot_be_written_is_named(config: object, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        to_plain(config)


def test_keys_become_text() -> None:
    assert to_plain({1: "a", None: "b", Color.RED: "c", 2.5: "d"}) == {
        "1": "a",
        "None": "b",
        "RED": "c",
        "2.5": "d",
    }


def test_a_loop_is_an_error_but_sharing_is_not() -> None:
    shared = [1, 2]
    assert to_plain({"a": shared, "b": {"c": shared}}) == {"a": [1, 2], "b": {"c": [1, 2]}}
    assert "&" not in to_yaml(to_plain({"a": shared, "b": shared}))
    loop: dict[str, object] = {}
    loop["me"] = [loop]
    with pytest.raises(UsageError, match=r"config\.me\[0\] contains itself"):
        to_plain(loop)


def test_does_not_import_the_libraries_it_knows(run_python: Any) -> None:
    code = "import sys, headway.run.plain as s; s.to_plain({'a': 1}); print({'torch', 'omegaconf'} & {*sys.modules})"
    assert run_python(code).stdout.strip() == "set()"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(st.dictionaries(st.text(), trees, max_size=5))
def test_plain_settings_survive_the_file(config: dict[str, object]) -> None:
    plain = to_plain(config)
    assert plain == config
    assert yaml.safe_load(to_yaml(plain).encode()) == config


def test_odd_values_survive_too() -> None:
    assert math.isnan(yaml.safe_load(to_yaml({"x": math.nan}))["x"])
    assert "schön" in to_yaml({"x": "schön"})
    assert sys.float_info.max == yaml.safe_load(to_yaml({"x": sys.float_info.max}))["x"]


def test_leaves_have_full_names() -> None:
    tree = {"model": {"depth": 2, "heads": {}, "sizes": [1, 2]}, "lr": None}
    assert list(leaves(tree)) == [
        ("model.depth", 2),
        ("model.heads", {}),
        ("model.sizes", [1, 2]),
        ("lr", None),
    ]
    assert list(leaves(None)) == list(leaves("text")) == []
