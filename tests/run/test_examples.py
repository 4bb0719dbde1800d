from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from headway.run import choice, creation, directory, info, lock, paths, plain, source


@pytest.mark.parametrize(
    "module",
    [choice, creation, directory, info, lock, paths, plain, source],
    ids=lambda module: module.__name__,
)
def test_the_examples_in_the_text_are_true(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
