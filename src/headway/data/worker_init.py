"""What workers begin with: signals ignored, and random numbers that are the sample's own and never the model's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from torch.utils import data as torch_data

from headway.dist.control.signals import ignore_signals


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """In the training process, leaves its random numbers as they were: they belong to the model."""
    if torch_data.get_worker_info() is not None:
        yield
        return
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def reseed(seed: int) -> None:
    """Seeds all three sources; not by torch.manual_seed, which piles up work for a GPU never used."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> 32)


@final
class WorkerStart:
    """A worker's first act; an object because it must travel to workers that are not forks."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        ignore_signals(worker)
        if self._users is not None:
            self._users(worker)
