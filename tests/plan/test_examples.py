"""The examples in docstrings and on the page run and say what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import headway.plan
from headway.plan.document import document

MODULES = [m.name for m in pkgutil.iter_modules(headway.plan.__path__) if not m.ispkg]
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"headway.plan.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_plan_file_on_the_page_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        data = yaml.safe_load(block)
        data["job"]["tokens"] = float(data["job"]["tokens"])
        assert document(data).layout.gpus == 8
