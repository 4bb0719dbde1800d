"""`AlertWatch`: checks runs every ten seconds, in a thread, and sends an alert when one ends or is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import final

from headway.errors import HeadwayError
from headway.record.alerts import Alert, AlertEvent, AlertSender
from headway.run import Run
from headway.run.info import DAMAGED, read_json
from headway.run.status import OVER
from headway.system.text import format_duration
from headway.watch.runs import summarize
from headway.watch.view import RunView, Snapshot
from headway.watch.view.run_view import LOST_CHECKS

_LOOK_S = 10.0
_LEAVE_S = 10.0
"""how long `__exit__` waits for alerts that are being sent"""
_EVENTS: Mapping[str, AlertEvent] = {
    "failed": "failed",
    "lost": "failed",
    "stopped": "stopped",
    "interrupted": "stopped",
    "cancelled": "stopped",
    "done": "finished",
}


@final
class AlertWatch:
    """Watches runs until the `with` block ends. A run that was over before the block gets no alert.

    `find` returns the runs; it is called for each check, so that new runs are watched, too.

    >>> with AlertWatch(lambda: runs_under("runs"), sender):
    ...     watch(runs, console)
    """

    def __init__(
        self, find: Callable[[], Sequence[Run]], sender: AlertSender, *, look_s: float = _LOOK_S
    ) -> None:
        self._find, self._sender, self._look_s = find, sender, look_s
        self._views: dict[str, RunView] = {}
        self._over: dict[str, object] = {}  # the end of each run that is over
        self._lost: dict[str, int] = {}  # consecutive checks in which a run looked lost
        self._has_looked = False
        self._unread: set[str] = set()  # runs that the first check could not read
        self._problems: dict[str, str] = {}  # reported and still present, by run
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="headway alerts")

    def __enter__(self) -> AlertWatch:
        self.look()  # a run that is over now was over before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self.look()  # a run may have ended since the last check
        self._sender.wait(_LEAVE_S)

    def look(self) -> None:
        """Checks all runs once, and starts to send their alerts."""
        try:
            runs = self._find()
            if not self._has_looked:
                self._put_aside(runs)
        except (HeadwayError, OSError) as error:  # the directory may come back
            self._report("", f"no run is watched for alerts now: {error}")
            return
        self._problems.pop("", None)
        for run in runs:
            try:
                self._look_at(run)
            except (HeadwayError, OSError, *DAMAGED) as error:  # one run does not hide the others
                self._report(run.id, f"{run.id} is not watched for alerts now: {error}")
                if not self._has_looked:
                    self._unread.add(run.id)
            else:
                self._problems.pop(run.id, None)
                self._unread.discard(run.id)
        self._has_looked = True

    def _put_aside(self, runs: Sequence[Run]) -> None:
        """Notes which runs are over, with one query of the scheduler: viewing thousands of them would take minutes."""
        for each in summarize(runs, heartbeat_wait_s=0):
            if each.status.state in OVER - {"lost"}:  # a view decides whether a run is lost
                self._over[each.run.id] = _end_of(each.run, _attempts(each.run))

    def _report(self, key: str, problem: str) -> None:
        """Reports a problem once, until it is gone."""
        if self._problems.get(key) != problem:
            self._problems[key] = problem
            self._sender.report(problem)

    def _look_at(self, run: Run) -> None:
        if run.id in self._over:
            if _end_of(run, _attempts(run)) == self._over[run.id]:
                return
            del self._over[run.id]  # it was started again
        was_before = not self._has_looked or run.id in self._unread
        view = self._views.get(run.id) or self._views.setdefault(run.id, RunView(run))
        snapshot = view.refresh()
        is_over = snapshot.header.state in OVER
        self._lost[run.id] = self._lost.get(run.id, 0) + 1 if snapshot.header.state == "lost" else 0
        if not was_before and 0 < self._lost[run.id] < LOST_CHECKS:
            return
        if is_over:
            self._over[run.id] = _end_of(run, snapshot.header.attempts)
            del self._views[run.id]
        if (alert := find_alert(run, snapshot)) and not (was_before and is_over):
            self._sender.send(run, alert)

    def _run(self) -> None:
        while not self._leaving.wait(self._look_s):
            self.look()


def _attempts(run: Run) -> int:
    return len((read_json(run.info_file) or {}).get("attempts") or ())


def _end_of(run: Run, attempts: int) -> object:
    """Returns what differs between two ends of a run: the number of attempts, or, if it has none, the time."""
    return attempts or (read_json(run.ended_file) or {}).get("time")


def find_alert(run: Run, snapshot: Snapshot) -> Alert | None:
    """Returns the alert for the state of a run, whether or not it was sent before."""
    header = snapshot.header
    event = _EVENTS.get(header.state)
    if event is not None:
        why = snapshot.failure.error if snapshot.failure else header.why
        return Alert.of(run, event, attempts=header.attempts, why=why, step=header.step)
    if header.silent_s is None:
        return None
    why = f"nothing was written for {format_duration(header.silent_s)}"
    return Alert.of(run, "silent", attempts=header.attempts, why=why, step=header.step)
