"""Every public name says what it is, and has an example that uses names that exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headway
from headway import errors

ROOT = Path(__file__).parents[2]


def load_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "scripts" / "make_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load_site()
PACKAGES = [headway] + [
    value for name in headway.__all__ if isinstance(value := getattr(headway, name), ModuleType)
]
NAMES = [(package, name) for package in PACKAGES for name, _ in site.public_names(package)]


def example(value: Any) -> str:
    """The code in a docstring, without prompts and results."""
    paragraphs = re.split(r"\n{2,}", inspect.getdoc(value) or "")
    prompts = [
        line[4:] for each in paragraphs for line in each.splitlines() if line.startswith((">>> ", "... "))
    ]
    code = [textwrap.dedent(each) for each in paragraphs[1:] if ">>>" not in each and site.is_code(each)]
    return "\n".join(prompts + code)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_has_a_sentence_and_an_example(package: ModuleType) -> None:
    lacking = []
    for name, value in site.public_names(package):
        first = (inspect.getdoc(value) or "").partition("\n\n")[0]
        if not re.match(r"[A-Z`].*[.:]$", first, re.DOTALL) or not example(value):
            lacking.append(name)
    assert lacking == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_examples_use_names_that_exist(package: ModuleType) -> None:
    wrong = []
    for name, value in site.public_names(package):
        for word in re.findall(r"\bhw((?:\.\w+)+)", example(value)):
            found: Any = headway
            for part in word.split(".")[1:]:
                if not isinstance(found, ModuleType | type):
                    break  # what it returns is another matter
                if not hasattr(found, part):
                    wrong.append(f"{name}: hw{word}")
                    break
                found = getattr(found, part)
    assert wrong == []


def test_the_package_of_each_name_is_described() -> None:
    assert [package.__name__ for package in PACKAGES if len(package.__doc__ or "") < 80] == []
    assert len(NAMES) > 150


def test_the_tree_of_errors_has_all_of_them_with_their_exit_codes() -> None:
    drawn = re.findall(r"^[ │├└─]*(\w+) +(\d+)    \w", errors.__doc__ or "", re.MULTILINE)
    defined = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.HeadwayError)
    }
    assert {name: int(code) for name, code in drawn} == defined


def test_examples_are_python() -> None:
    for package, name in NAMES:
        code = example(getattr(package, name))
        try:
            ast.parse(code)
        except SyntaxError as error:
            pytest.fail(f"{package.__name__}.{name}: {error}\n{code}")
