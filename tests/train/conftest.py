"""The toys of these tests can be imported, in pytest's process and in its ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that has joined nobody yet, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on ranks; small tensors do not gain from more
    yield
    torch.set_num_threads(threads)
