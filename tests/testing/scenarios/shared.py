from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Recipe:
    """A class that only this file defines."""

    name: str


@pytest.fixture
def recipe() -> Recipe:
    return Recipe("cake")
