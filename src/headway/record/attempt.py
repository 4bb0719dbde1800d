"""One attempt at a run, recorded from its first line to its exit code: the door of this room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import final

from headway import dist
from headway.dist import World
from headway.errors import DONE, INTERRUPTED, HeadwayError, Stopped
from headway.record import diagnostics, screen
from headway.record.logs import RankLog, rank_log
from headway.run import Run


@final
@dataclass(frozen=True, kw_only=True)
class Recording:
    """An attempt under way: its number, from 1, and this rank's log."""

    attempt: int
    log: RankLog


@contextmanager
def recording(run: Run, world: World, *, config: object = None) -> Iterator[Recording]:
    """Records what happens in the block as the run's next attempt. Call it on all ranks.

    The root holds the run's lock, writes diagnostics, prints the start-up screen, and in the end notes in
    `run.json` how it went. Every rank prints into its log. Nothing stays installed afterwards.

        with recording(run, world, config={"lr": 3e-4}):
            train()
    """
    facts: diagnostics.Facts = {}
    with ExitStack() as stack:

        def begin() -> int:
            stack.enter_context(run.lock())
            number = run.begin_attempt(world={**asdict(world), "device": str(world.device)})
            stack.push(partial(_end, run, number, os.getpid()))
            facts.update(attempt=number, **diagnostics.collect(world, run))
            diagnostics.write(run, facts)
            return number

        number = dist.from_root(begin)
        log = stack.enter_context(rank_log(run, rank=world.rank, attempt=number))
        if world.rank == 0:
            screen.show(screen.describe(run, world, facts, config=config))
        else:
            stack.enter_context(dist.terminal(log.original_stderr_fd))
        yield Recording(attempt=number, log=log)


def ending(error: BaseException | None) -> tuple[str, int]:
    """How an attempt that ended with `error` went, and the exit code it leads to.

    >>> ending(None), ending(KeyboardInterrupt()), ending(ValueError("loss is nan")), ending(SystemExit(3))
    (('done', 0), ('interrupted', 130), ('failed', 1), ('failed', 3))
    """
    match error:
        case None | SystemExit(code=None | 0):
            return "done", DONE
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case Stopped():
            return "stopped", error.exit_code
        case HeadwayError():
            return "failed", error.exit_code
        case SystemExit(code=int(code)):
            return "failed", code
    return "failed", 1


def _end(run: Run, number: int, pid: int, _kind: object, error: BaseException | None, _trace: object) -> None:
    if os.getpid() == pid:  # a forked child that unwinds this stack ends itself, not the attempt
        status, code = ending(error)
        run.end_attempt(number, status=status, exit_code=code)
