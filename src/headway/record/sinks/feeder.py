"""`feeding`: starts a process per sink, in the training process, and sends it the status at the end of the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from headway.dist.control.signals import block_signals
from headway.errors import UsageError
from headway.interpreter import module_command, module_environment
from headway.record.attempt import ending
from headway.record.sinks import transport
from headway.record.sinks.base import Sink
from headway.run import Run
from headway.run.info import to_json
from headway.system import files
from headway.system.locks import block_forks
from headway.system.log import logger
from headway.system.redact import redact, redact_tree

_FINISH_S = 30.0
_KILLED_S = 2.0
"""how long to wait for a process after it was killed"""
_LAST_BYTES = 1 << 14


def check_sink(sink: Sink, others: Sequence[Sink] = ()) -> None:
    """Raises `UsageError` if the sink cannot be fed alongside the others. Nothing is started."""
    if not isinstance(sink, Sink):
        raise UsageError(f"{sink!r:.80} is not a sink: derive its class from headway.record.sinks.Sink")
    if not re.fullmatch(r"[\w.-]+", sink.name):
        raise UsageError(
            f"{sink.name!r} is not a valid name of a sink: use letters, digits, '.', '_' and '-'"
        )
    if sink.name in [other.name for other in others]:
        raise UsageError(f"there is a sink named {sink.name!r} already: give the other class another `name`")
    transport.describe(sink)


@contextmanager
def feeding(
    run: Run, sinks: Sequence[Sink], *, rank: int = 0, local_rank: int = 0, finish_s: float = _FINISH_S
) -> Iterator[None]:
    """Feeds sinks from the run's metrics and media while the block runs.

    Call it within `recording`, on all ranks or on rank 0 alone: other ranks feed only sinks with `feeds_all_ranks`. A
    sink cannot affect the run. Its output goes to `log/sink-NAME.txt`; a failure is reported at the end, and a sink
    that has not taken all rows `finish_s` seconds after the block is killed.

        with feeding(run, [Wandb(project="digits")]):
            train()
    """
    mine = [sink for sink in sinks if rank == 0 or sink.feeds_all_ranks]
    feeders, pid = [Feeder(run, sink, rank=rank, local_rank=local_rank) for sink in mine], os.getpid()
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        if os.getpid() == pid:  # a forked child that leaves the block must not end the sinks
            status, code = ending(error)
            for feeder in feeders:
                feeder.finish(status, code)
            deadline = time.monotonic() + finish_s
            for feeder in feeders:
                feeder.join(deadline, finish_s)


def write_description(run: Run, sink: Sink) -> None:
    """Writes the class and settings of a sink to the run, so that it can be fed again later."""
    run.check_owner()
    with files.storage(f"write {run.sink_file(sink.name)}"):
        files.write_atomic(run.sink_file(sink.name), to_json(redact_tree(transport.describe(sink))))


@final
class Feeder:
    """A process that feeds one sink, seen from the training process."""

    def __init__(self, run: Run, sink: Sink, *, rank: int = 0, local_rank: int = 0) -> None:
        if rank == 0:
            write_description(run, sink)
        self._sink, self._log = sink, run.sink_log(sink.name, rank)
        self._sync = f"headway runs sync {run.shell_name}"
        with files.storage(f"open {self._log}"):
            log = files.open_private(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            # other threads may start processes at the same time; signals are for the training process
            with block_forks(), block_signals():
                self._process = subprocess.Popen(
                    module_command("headway.record.sinks"),
                    env=module_environment(),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the training process
                )
        finally:
            os.close(log)
        owner = run.fence.number if run.fence else None
        facts = {"run": str(run.path), "owner": owner, "rank": rank, "local_rank": local_rank}
        self._send({**facts, "sink": transport.describe(sink)})

    def finish(self, status: str, exit_code: int) -> None:
        """Sends the status of the run; the sink takes the remaining rows and closes."""
        self._send({"status": status, "exit_code": exit_code})

    def join(self, deadline: float, finish_s: float) -> bool:
        """Waits for the process until the deadline, then kills it. Warns of a failure; returns whether it succeeded."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a file system call may delay even SIGKILL
                self._process.wait(_KILLED_S)
            self._warn(f"did not take all rows within {finish_s:.0f} s and was killed")
            return False
        finally:
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
        if code < 0:
            self._warn(f"was killed by {signal.Signals(-code).name}; to send the rest: {self._sync}")
        elif code:
            self._warn(f"failed: {redact(_last_line(self._log))[:300]}")
        return code == 0

    def _send(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `join` reports its exit code
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _warn(self, what: str) -> None:
        logger.warning(
            "%s %s; all metrics are in the run directory, details in %s", self._sink.title, what, self._log
        )


def _last_line(log: Path) -> str:
    """Returns the last line of a sink's output, which may be of any length; empty if it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        return "".join(file.read().decode(errors="replace").strip().splitlines()[-1:])
    return ""
