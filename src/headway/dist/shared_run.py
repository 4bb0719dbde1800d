"""One run directory for all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from headway.dist.group import current, world
from headway.dist.guard import from_root
from headway.failure import Record
from headway.run import Run


def open_run(root: str | Path = "runs", *, name: str = "run", config: object = None) -> Run:
    """Makes a run directory on rank 0 and opens it on all ranks; failures are recorded there from now on.

    >>> run = headway.dist.open_run("runs", name="digits", config={"lr": 3e-4})
    """

    def create() -> str:
        facts = asdict(world()) | {"device": str(world().device)}
        shared = {key: facts[key] for key in ("world_size", "nodes", "launcher", "device")}
        return str(Run.create(root, name=name, config=config, command=sys.argv, world=shared).path)

    run = Run.open(from_root(create))
    current().run = run
    return run


@contextmanager
def terminal(fd: int) -> Iterator[None]:
    """While this rank's stderr goes to its log file, words for people go to `fd`."""
    group = current()
    before, group.terminal = group.terminal, fd
    try:
        yield
    finally:
        group.terminal = before


@contextmanager
def at_failure(callback: Callable[[Record], None]) -> Iterator[None]:
    """While in here, rank 0 calls `callback` with the record when another rank fails, just before all ranks end."""
    callbacks = current().at_failure
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)
