"""One run directory for all ranks."""

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
from headway.run.choice import Choice, choose


def open_run(root: str | Path = "runs", *, name: str = "run", config: object = None) -> Run:
    """Makes a run directory on rank 0 and opens it on all ranks; failures are recorded there from now on.

    If HEADWAY_RUN names a run directory, as it does in a job that `headway submit` made, it is that one.

    >>> run = headway.dist.open_run("runs", name="digits", config={"lr": 3e-4})
    """
    return choose_run(root, name=name, config=config, resume="never").run


def choose_run(root: str | Path, *, name: str, config: object, resume: str | Path) -> Choice:
    """As `open_run`, but it may be a run to go on with: see `choosing`."""

    def choice() -> dict[str, Any]:
        here = world()
        facts = {
            "world_size": here.world_size,
            "nodes": here.nodes,
            "launcher": here.launcher,
            "device": here.device.type,
        }
        opened = current().opened
        chosen = choose(root, name=name, config=config, world=facts, resume=resume, opened=opened)
        run = {"path": str(chosen.run.path), "id": chosen.run.id, "name": chosen.run.name}
        return {"run": run, "why": chosen.why, "finished": chosen.finished}

    # told, not looked up: a network file system may show a new folder to other nodes only later
    told = from_root(choice)
    run = Run(path=Path(told["run"]["path"]), id=told["run"]["id"], name=told["run"]["name"])
    current().run = run
    current().opened.add(run.path)
    HEARTBEAT.belongs_to(run.path)
    return Choice(run=run, why=told["why"], finished=told["finished"])


def record_failures_in(run: Run) -> None:
    """Failures of this rank are recorded in `run`, until it trains in one: for jobs whose code need not train at all.

    >>> record_failures_in(Run.open(os.environ["HEADWAY_RUN"]))  # doctest: +SKIP
    """
    current().run = run
    HEARTBEAT.belongs_to(run.path)


def current_run() -> Run | None:
    """The run that this rank trains in; None before there is one."""
    return current().run if is_initialized() else None


@contextmanager
def use_terminal(fd: int) -> Iterator[None]:
    """While this rank's stderr goes to its log file, words for people go to `fd`."""
    group = current()
    before, group.terminal = group.terminal, fd
    try:
        yield
    finally:
        group.terminal = before


@contextmanager
def at_failure(callback: Callable[[FailureRecord], None]) -> Iterator[None]:
    """While in here, rank 0 calls `callback` with the record when another rank fails, just before all ranks end."""
    callbacks = current().at_failure
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)
