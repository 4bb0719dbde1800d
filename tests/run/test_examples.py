from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from headway.run import directory, lock, plain, source
from headway.system import files, redact


@pytest.mark.parametrize(
    "module", [files, redact, directory, lock, plain, source], ids=lambda module: module.__name__
)
def test_the_examples_in_the_text_are_true(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
