"""How the batches of a loader get to the device: through a `DeviceFeed` to a GPU, by torch's own copy elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from headway.data.feed.device_feed import DeviceFeed, FeedableLoader, shared_feed, to_device
from headway.data.feed.staging_thread import StagingThread


class BatchMover(NamedTuple):
    """How the batches of a loader get to the device."""

    read: Callable[[Iterator[Any]], Iterator[Any]]
    """yields the batches of an opened loader, and prefetches them where that changes nothing else"""
    move: Callable[[Any], Any]
    """returns a batch on the device"""


@contextmanager
def moving(loader: Iterable[Any], device: torch.device) -> Iterator[BatchMover]:
    """Yields the mover for the batches of a loader; copies to a GPU overlap with computation.

    Open the loader within this context. If it has threads of its own, they copy or pin its batches. If the batches
    are in memory already, a thread of the feed copies them. Any other loader makes its batches on the training thread,
    one at a time: it may draw random numbers, and has a position that is saved.
    """
    if device.type != "cuda":
        yield BatchMover(iter, partial(to_device, device=device))
        return
    feed = shared_feed(device)
    if type(loader) in (list, tuple):
        with closing(StagingThread(feed)) as thread:
            yield BatchMover(thread.stage_ahead, thread.move)
        return
    with _feeding(loader, feed):
        yield BatchMover(iter, feed.move)


@contextmanager
def _feeding(loader: Iterable[Any], feed: DeviceFeed) -> Iterator[None]:
    """Makes the threads of a loader copy or pin its batches; restores the loader for loops outside of the pipeline."""
    if isinstance(loader, FeedableLoader):
        loader.feed_to(feed)
        try:
            yield
        finally:
            loader.feed_to(None)
    elif isinstance(loader, TorchDataLoader) and loader.num_workers:
        pinned, loader.pin_memory = loader.pin_memory, True
        try:
            yield
        finally:
            loader.pin_memory = pinned
    else:
        yield
