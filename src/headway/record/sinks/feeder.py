"""The training process's side: starts a process per tracker, and in the end tells it how the run went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

from headway.record.attempt import ending
from headway.record.sinks.settings import Sink
from headway.run import Run
from headway.system import files
from headway.system.redact import redact

PATIENCE = 30.0
"""Seconds that the end of a run waits for its trackers, all together."""


@contextmanager
def feeding(run: Run, sinks: Sequence[Sink], *, patience: float = PATIENCE) -> Iterator[None]:
    """Feeds trackers from the run's metrics file while the block runs. Call it on one rank, within `recording`.

    Trackers get no say in the run: what they print goes to `log/sink-NAME.txt`, one that fails is mentioned in the
    end, one that does not come to an end within `patience` seconds is left behind.

        with feeding(run, [Wandb(project="digits")]):
            train()
    """
    feeders, pid = [Feeder(run, sink) for sink in sinks], os.getpid()
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        if os.getpid() == pid:  # a forked child that comes this way has nothing to tell
            status, code = ending(error)
            for feeder in feeders:
                feeder.tell(status, code)
            until = time.monotonic() + patience
            for feeder in feeders:
                feeder.leave(max(0.0, until - time.monotonic()))


@final
class Feeder:
    """A process that feeds one tracker."""

    def __init__(self, run: Run, sink: Sink) -> None:
        self._sink, self._log = sink, run.sink_log(sink.kind)
        log = files.open_private(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headway.record.sinks"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training process
            )
        finally:
            os.close(log)
        self._write({"run": str(run.path), **sink.request()})

    def tell(self, status: str, exit_code: int) -> None:
        """How the run ended."""
        self._write({"status": status, "exit_code": exit_code})

    def leave(self, patience: float) -> None:
        """Waits for the tracker to take the rest, within limits."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._say(f"did not take all rows within {PATIENCE:.0f} s and was ended")
            return
        finally:
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
        if code:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            self._say(f"failed: {redact(''.join(last))[:300]}")

    def _write(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the tracker is dead: its exit code is looked at in the end
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _say(self, what: str) -> None:
        print(
            f"headway: {self._sink.title} {what}; the metrics are all in the run directory, more is in {self._log}",
            file=sys.stderr,
        )
