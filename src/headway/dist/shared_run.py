"""The run directory that all ranks share, in which their failures are recorded."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headway.dist.collective.guard import from_root
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.failure.record import FailureRecord
from headway.dist.group import current, is_initialized, world
from headway.errors import HeadwayError
from headway.run import Run
from headway.run.choice import NEW, Choice, choose
from headway.run.passed_over import is_at_prompt
from headway.system.log import logger


def open_run(
    root: str | Path = "runs",
    *,
    name: str = "run",
    config: object = None,
    free: Collection[str] = (),
    resume: str | Path = "never",
) -> Run:
    """Makes a run directory on rank 0 and opens it on all ranks. Failures are recorded there from now on.

    With `resume="auto"` it is the newest unfinished run of this name and with this config, if there is one; with
    "must" there has to be one; a path is the run directory to resume. Settings that `free` names may differ. The caller
    loads its checkpoints. A run that is done counts as unfinished until the script that trained it has ended without an
    error. If HEADWAY_RUN names a run directory, as it does in a job of `headway submit`, that one is opened.

    >>> run = headway.dist.open_run("runs", name="digits", config={"lr": 3e-4}, resume="auto")
    """
    choice = choose_run(root, name=name, config=config, free=free, resume=resume)
    if resume != "never":
        current().reopened_runs.add(choice.run.path)
    if choice.why != NEW and world().is_root:
        logger.info("training in %s: %s", choice.run.id, choice.why)
    return choice.run


def choose_run(
    root: str | Path, *, name: str, config: object, resume: str | Path, free: Collection[str] = ()
) -> Choice:
    """Chooses the run on rank 0, as `open_run` does, and also returns why: see `headway.run.choice`."""

    def choose_on_root() -> dict[str, Any]:
        here = world()
        facts = {
            "world_size": here.world_size,
            "nodes": here.nodes,
            "launcher": here.launcher,
            "device": here.device.type,
        }
        opened = current().opened_runs
        choice = choose(root, name=name, config=config, world=facts, resume=resume, free=free, opened=opened)
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


def note_script(run: Run, attempt: int | None = None) -> None:
    """Records in a finished run, or one about to be, that its script has not ended, and later that it has.

    If the script is killed in between, while it tests or exports its model, the same command opens this run again
    instead of training another one. `attempt` is the one that finishes the run; None if an earlier one has.
    """
    if is_at_prompt():  # no command repeats it
        return
    if not is_initialized():  # the script has already left the ranks, so its end could not be recorded
        return
    if multiprocessing.parent_process() is not None:  # a child process; if forked, it ends without `atexit`
        return
    number = len(run.info()["attempts"]) if attempt is None else attempt
    if attempt is not None:
        run.note_attempt(number, script_ended=False)
    current().at_clean_exit.append(partial(_note_end, run, number))


def _note_end(run: Run, attempt: int) -> None:
    try:
        run.note_attempt(attempt, script_ended=True)
    except (OSError, HeadwayError) as error:  # the script has done its work
        logger.warning("%s; the same command restores %s instead of training a new run", error, run.id)


def use_run(run: Run | None) -> None:
    """Records failures of this rank in `run` until it trains in another: for jobs whose code may not train at all.

    With None this rank has no run, because another process owns the one that it requested.

    >>> use_run(Run.open(os.environ["HEADWAY_RUN"]))  # doctest: +SKIP
    """
    current().failure_handler.run = run
    HEARTBEAT.set_run(run and run.path, owner=run.fence.number if run and run.fence else None)


def current_run() -> Run | None:
    """Returns the run that this rank trains in; None before there is one."""
    return current().failure_handler.run if is_initialized() else None


@contextmanager
def use_terminal(fd: int) -> Iterator[None]:
    """Writes the cause of a failure to `fd`, the screen, while this rank's stderr goes to its log file."""
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
