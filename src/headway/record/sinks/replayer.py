"""Feeds the sinks of a run that is over, for example a tracker that could not be reached during the run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.errors import UsageError
from headway.record.sinks import transport
from headway.record.sinks.base import Sink
from headway.record.sinks.feeder import Feeder
from headway.run import Run
from headway.run.exit_codes import code_of
from headway.system import ownership
from headway.system.jsonlines import parse_json

_LIMIT_S = 3600.0


def replay(
    run: Run, names: Sequence[str] = (), *, from_start: bool = False, limit_s: float = _LIMIT_S
) -> dict[str, bool]:
    """Sends the remaining rows to the sinks of the run, or to those with these names.

    Returns for each sink whether it took all rows. `from_start` sends all rows again.

    >>> replay(Run.open("runs/digits-2026.11.15-14.30-x7k2"), ["wandb"])
    {'wandb': True}
    """
    run.check_private()  # classes that its files name are imported
    known = sorted(path.stem.removeprefix("sink-") for path in run.metrics_dir.glob("sink-*.json"))
    for name in names:
        if name not in known:
            have = ", ".join(known) or "none"
            raise UsageError(f"{run.id} had no sink {name!r}; it had: {have}")
    if not known:
        raise UsageError(f"{run.id} had no sink: add one to the script, such as pipe.enable_wandb()")
    found = {}
    with run.lock() as lock:  # so that no training process feeds the same sink
        held = run.held_as(lock.fence.number)
        attempts = run.info()["attempts"]
        status, code = (attempts[-1]["status"], attempts[-1]["exit_code"]) if attempts else ("failed", 1)
        # also of one that was killed: "running" or "lost"
        if status not in ("done", "stopped", "interrupted"):
            status = "failed"
        if code is None:
            code = code_of(status)
        for name in names or known:
            sink = _made(run, name)
            ranks = _fed_ranks(run, sink)
            for rank in ranks if from_start else ():
                run.sink_offset_file(name, rank).unlink(missing_ok=True)
                run.sink_media_file(name, rank).unlink(missing_ok=True)
            feeders = [Feeder(held, sink, rank=rank) for rank in ranks]
            for feeder in feeders:
                feeder.finish(status, code)
            deadline = time.monotonic() + limit_s
            took = [feeder.join(deadline, limit_s) for feeder in feeders]  # a list, to wait for every one
            found[name] = all(took)
    return found


def _fed_ranks(run: Run, sink: Sink) -> list[int]:
    """Returns the ranks whose rows the sink takes."""
    if not sink.feeds_all_ranks:
        return [0]
    return sorted(
        {0} | {int(path.stem.removeprefix("rank-")) for path in run.metrics_dir.glob("rank-?????.jsonl")}
    )


def _made(run: Run, name: str) -> Sink:
    try:
        description = parse_json(ownership.read_private(run.sink_file(name)))
    except UsageError:  # which is a ValueError, too
        raise
    except (OSError, ValueError):
        description = None
    if not isinstance(description, dict) or not description:
        raise UsageError(f"{run.sink_file(name)} is damaged: it does not describe a sink")
    return transport.make(description)
