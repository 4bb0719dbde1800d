"""One run directory for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.dist.group import current, world
from headway.dist.guard import from_root
from headway.failure import Record
from headway.run import Run


def open_run(root: str | Path = "runs", *, name: str = "run", config: object = None) -> Run:
    """Makes a run directory on rank 0 and opens it on all ranks; failures are recorded there from now on.

    >>> run = headway.dist.open_run("runs", name="digits", config={"lr": 3e-4})
    """

    def create() -> dict[str, str]:
        here = world()
        facts = {
            "world_size": here.world_size,
            "nodes": here.nodes,
            "launcher": here.launcher,
            "device": here.device.type,
        }
        run = Run.create(root, name=name, config=config, world=facts)
        return {"path": str(run.path), "id": run.id, "name": run.name}

    # told, not looked up: a network file system may show a new folder to other nodes only later
    made = from_root(create)
    run = Run(path=Path(made["path"]), id=made["id"], name=made["name"])
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
