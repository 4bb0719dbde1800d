from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import headway
from headway import system

ROOT = Path(headway.__file__).parent
MODULES = sorted(path for path in Path(system.__path__[0]).rglob("*.py") if path.stem != "__main__")
NAMES = ["headway." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES]


@pytest.mark.parametrize("name", ["headway.errors", *(name.removesuffix(".__init__") for name in NAMES)])
def test_the_examples_in_the_text_are_true(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
