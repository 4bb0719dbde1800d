"""A dataset that ignores ranks gives each of them all of its samples: one line says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader, IterableDataset, TensorDataset
from toys import FEATURES, Batches, Classify, make_pipe

import headway as hw
from headway.system.log import logger
from headway.testing import ranks


class Own(IterableDataset[Any]):
    """Home-made; splits its samples only if it is told to."""

    def __init__(self, *, split: bool) -> None:
        self.split, self.place = split, 0

    def __iter__(self) -> Iterator[Any]:
        numbers = range(hw.rank(), 24, hw.world_size()) if self.split else range(24)
        while self.place < len(numbers):
            number = numbers[self.place]
            self.place += 1
            yield torch.full((FEATURES,), float(number)), number % 2
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def samples() -> TensorDataset:
    return TensorDataset(torch.zeros(24, FEATURES), torch.zeros(24, dtype=torch.int64))


LOADERS: dict[str, tuple[Any, str | None]] = {
    "own": (lambda: hw.data.DataLoader(Own(split=False), batch_size=4), "Own"),
    "own of torch": (lambda: TorchLoader(Own(split=False), batch_size=4), "Own"),
    "torch": (lambda: TorchLoader(samples(), batch_size=4), "DataLoader"),
    "split": (lambda: hw.data.DataLoader(Own(split=True), batch_size=4), None),
    "other batches": (lambda: Batches(6, rank=hw.rank()), None),
    "equal samples": (lambda: hw.data.DataLoader(samples(), batch_size=4, shuffle=True), None),
}


def warnings_of(folder: Path, loader: Iterable[Any]) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        pipe = make_pipe(folder)
        pipe.register_dataset("train", loader)
        pipe.append_stage(Classify(log_every=2), max_epochs=2)
        pipe.run()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "the same first batch" in line]


@ranks(2)
@pytest.mark.parametrize("name", LOADERS)
def test_ranks_with_the_same_batches_are_told(name: str, tmp_path: Path) -> None:
    make, source = LOADERS[name]
    lines = warnings_of(tmp_path, make())
    if source is None or hw.rank():
        assert lines == []
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"all 2 ranks have the same first batch, so {source} may give all")
