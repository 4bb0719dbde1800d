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
from headway.cli import plan as verb
from headway.plan.input.plan_file import parse_plan

MODULES = [
    module.name
    for module in pkgutil.walk_packages(headway.plan.__path__, "headway.plan.", onerror=lambda _: None)
    if not module.name.startswith(
        ("headway.plan.tracer.process", "headway.plan.tracer.probe")
    )  # these import torch
]
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_plan_file_on_the_page_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    whole = yaml.safe_load(blocks[0])
    whole["job"]["tokens"] = float(whole["job"]["tokens"])
    for block in blocks:
        data = {**yaml.safe_load(block), "job": whole["job"]}
        data = {**whole, **data}  # a later block shows another model
        assert parse_plan(data).layout.gpus == 8


def test_the_first_example_on_the_page_says_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    command, title, verdict = re.findall(
        r"```console\n\$ headway plan (.*)\n(.*)\n(.*)\n\.\.\.\n```", PAGE.read_text()
    )[0]
    assert verb.main(command.split()) == 3
    assert capsys.readouterr().out.splitlines()[:2] == [title, verdict]


def test_the_python_on_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "print" in block
    )
    exec(compile(code, str(PAGE), "exec"), {})
    comment = re.search(r"time\.step\"\]\)\s+# (.*)", code)
    assert comment and capsys.readouterr().out.splitlines()[-1] == comment[1]
