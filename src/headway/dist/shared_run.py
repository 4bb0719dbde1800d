"""The run directory that all ranks share, and what happens to its failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.dist.collective.guard import from_root
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.failure.record import FailureRecord
from headway.dist.group import current, is_initialized, world
from headway.run import Run
from headway.run.choice import NEW, Choice, choose
from headway.system.log import logger


def open_run(
    root: str | Path = "runs", *, name: str = "run", config: object = None, resume: str | Path = "never"
) -> Run:
    """Makes a run directory on rank 0 and opens it on all ranks. Failures are recorded there from now on.

    With `resume="auto"` it is the newest unfinished run of this name and with this config, if there is one; with
    "must" there has to be one; a path is the run directory to resume. What was saved there is the caller's to load. If
    HEADWAY_RUN names a run directory, as it does in a job that `headway submit` made, it is that one.

    >>> run = headway.dist.open_run("runs", name="digits", config={"lr": 3e-4}, resume="auto")
    """
    choice = choose_run(root, name=name, config=config, resume=resume)
    if choice.why != NEW and world().is_root:
        logger.info("training in %s: %s", choice.run.id, choice.why)
    return choice.run


def choose_run(root: str | Path, *, name: str, config: object, resume: str | Path) -> Choice:
    """Does what `open_run` does, but may resume an earlier run: see `headway.run.choice`."""

    def choose_on_root() -> dict[str, Any]:
        here = world()
        facts = {
            "world_size": here.world_size,
            "nodes": here.nodes,
            "launcher": here.launcher,
            "device": here.device.type,
        }
        opened = current().opened_runs
        choice = choose(root, name=name, config=config, world=facts, resume=resume, opened=opened)
        run = {"path": str(choice.run.path), "id": choice.run.id, "name": choice.run.name}
        parent = None if choice.parent is None else str(choice.parent)
        return {"run": run, "why": choice.why, "finished": choice.finished, "parent": parent}

    # sent, not looked up: a network file system may show a new directory to other nodes only later
    chosen = from_root(choose_on_root)
    run = Run(path=Path(chosen["run"]["path"]), id=chosen["run"]["id"], name=chosen["run"]["name"])
    use_run(run)
    current().opened_runs.add(run.path)
    parent = None if chosen["parent"] is None else Path(chosen["parent"])
    return Choice(run=run, why=chosen["why"], finished=chosen["finished"], parent=parent)


def use_run(run: Run | None) -> None:
    """Records failures of this rank in `run` until it trains in another: for jobs whose code may not train at all.

    None: this rank has no run, for the one it asked for is another process's.

    >>> use_run(Run.open(os.environ["HEADWAY_RUN"]))  # doctest: +SKIP
    """
    current().failure_handler.run = run
    HEARTBEAT.set_run(run and run.path, owner=run.fence.number if run and run.fence else None)


def current_run() -> Run | None:
    """Returns the run that this rank trains in; None before there is one."""
    return current().failure_handler.run if is_initialized() else None


@contextmanager
def use_terminal(fd: int) -> Iterator[None]:
    """Sends what people must see to `fd`, while this rank's stderr goes to its log file."""
    handler = current().failure_handler
    before, handler.terminal = handler.terminal, fd
    try:
        yield
    finally:
        handler.terminal = before


@contextmanager
def at_failure(callback: Callable[[FailureRecord], None]) -> Iterator[None]:
    """Makes rank 0 call `callback` with the record when another rank fails in here, just before all ranks exit."""
    callbacks = current().failure_handler.callbacks
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)
