"""What data workers do first: ignore signals, and draw random numbers that belong to the sample, not to the model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch.utils import data as torch_data

from headway.dist.control.signals import block_signals, end_by_own_signal, ignore_signals


def open_workers(loader: torch_data.DataLoader[Any]) -> Iterator[Any]:
    """Returns `iter(loader)` of torch's loader, whose `worker_init_fn` is a `WorkerInit`, with workers ended by us."""
    with block_signals():  # workers start with the signals blocked that are meant for the rank
        batches = iter(loader)
    for worker in getattr(batches, "_workers", ()):
        end_by_own_signal(worker)
    return batches


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores the random state of the training process afterwards, because it belongs to the model."""
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


def rng_states() -> tuple[bytes, object, object]:
    """Returns what the random number generators of torch, random and numpy will draw next, for comparison."""
    _, words, *rest = np.random.get_state(legacy=True)
    drawn_by_numpy = np.asarray(words).tobytes(), *rest
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), drawn_by_numpy


def reseed(seed: int) -> None:
    """Seeds torch, random and numpy; not by `torch.manual_seed`, which queues work for a GPU that is never used."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> 32)


@final
class WorkerInit:
    """The `worker_init_fn` of torch's loader; an object, because workers that are not forks receive it by pickle."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker: int) -> None:
        gc.freeze()  # garbage of the rank may hold tensors of a GPU, and freeing one in a forked process aborts it
        ignore_signals(worker)
        if self._user_init is not None:
            self._user_init(worker)
