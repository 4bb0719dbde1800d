"""How the batches of a loader get to the device: by `DeviceFeed` to a GPU, and else as torch copies."""

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
    """yields the batches of an opened loader; where nothing depends on it, ahead of what is asked for"""
    move: Callable[[Any], Any]
    """returns a batch on the device"""


@contextmanager
def moving(loader: Iterable[Any], device: torch.device) -> Iterator[BatchMover]:
    """Gives what moves the batches of a loader to the device: to a GPU, beside what it computes.

    The loader is opened within. Threads copy, or leave batches in memory from which the GPU copies by itself: those of
    the loader if it has any, else a thread of the feed if the batches are in memory already. Any other loader makes its
    batches on the thread that trains, one at a time: it may draw random numbers, and has a position that is saved.
    """
    if device.type != "cuda":
        yield BatchMover(_as_it_is, partial(to_device, device=device))
        return
    feed = shared_feed(device)
    if type(loader) in (list, tuple):
        with closing(StagingThread(feed)) as thread:
            yield BatchMover(thread.stage_ahead, thread.move)
        return
    with _feeding(loader, feed):
        yield BatchMover(_as_it_is, feed.move)


def _as_it_is(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


@contextmanager
def _feeding(loader: Iterable[Any], feed: DeviceFeed) -> Iterator[None]:
    """Has the threads of a loader copy or pin its batches; a loop outside of the pipeline gets them as before."""
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
