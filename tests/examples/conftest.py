"""What the tests of the examples share: an empty directory to work in, and scripts that run in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import dist

EXAMPLES = Path(__file__).parents[2] / "examples"
Play = Callable[..., dict[str, Any]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Runs a script of the examples here, as `python SCRIPT WORDS` would in an empty directory; returns its names."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(script: str, *words: str) -> dict[str, Any]:
        path = EXAMPLES / script
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        try:
            return runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.modules.pop("prepare", None)  # two examples have one
            dist.leave()

    yield run
    torch.set_num_threads(threads)
