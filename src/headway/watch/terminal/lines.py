"""`follow`: prints a line about a run every ten seconds, for pipes and logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from headway.errors import UsageError
from headway.run.status import OVER
from headway.system.text import format_duration
from headway.watch.terminal.screen import ordered_curves
from headway.watch.view import RunView, Snapshot
from headway.watch.view.run_view import LOST_CHECKS
from headway.watch.view.snapshot import RunMessage

_METRICS = 3


def follow(view: RunView, show: Callable[[str], object], *, every_s: float = 10.0) -> Snapshot:
    """Calls `show` with a line about the run every `every_s` seconds, and with each new message, until the run is over.

    Raises `UsageError` if the run directory is removed in the meantime.

    >>> follow(RunView(run), print)
    14:30:05 running, step 4,200 of 10,000 (42%), train/loss 0.51, 12,400 samples/s, ETA 1h12m, saved 3m10s ago
    """
    shown: set[RunMessage] = set()
    times_lost = 0  # consecutive snapshots
    while True:
        snapshot = view.refresh()
        if snapshot.header.state == "new" and not view.run.path.exists():
            raise UsageError(f"{view.run.path} is gone: the run was removed or moved")
        for message in snapshot.messages:  # not only the last ones: clocks of ranks differ
            if message not in shown:
                show(f"{_clock(message.time)} {message.kind}: {message.text}")
        shown = set(snapshot.messages)
        show(f"{_clock(snapshot.time)} {describe(snapshot)}")
        header = snapshot.header
        times_lost = times_lost + 1 if header.state == "lost" and not header.is_certain else 0
        if header.state in OVER and not 0 < times_lost < LOST_CHECKS:
            for line in snapshot.failure.traceback if snapshot.failure else ():
                show(line)
            return snapshot
        time.sleep(every_s)


def describe(snapshot: Snapshot) -> str:
    """Returns the state of a run in one line."""
    header, speed, safety = snapshot.header, snapshot.speed, snapshot.safety
    parts = [header.state if not header.why else f"{header.state} ({header.why})"]
    if header.silent_s is not None:
        parts.append(f"silent for {format_duration(header.silent_s)}")
    if header.step is not None:
        of = f" of {header.total_steps:,}" if header.total_steps else ""
        percent = "" if header.progress is None else f" ({header.progress:.0%})"
        parts.append(f"step {header.step:,}{of}{percent}")
    for name in ordered_curves(snapshot.curves)[:_METRICS]:
        parts.append(f"{name} {snapshot.curves[name].last:.4g}")
    if speed.samples_per_s:
        parts.append(f"{speed.samples_per_s:,.0f} samples/s")
    if header.eta_s is not None:
        parts.append(f"ETA {format_duration(header.eta_s)}")
    if safety.age_s is not None:
        parts.append(f"saved {format_duration(safety.age_s)} ago")
    return ", ".join(parts)


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%H:%M:%S")
