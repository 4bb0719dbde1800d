"""`AlertWatch`: looks at runs every few seconds, in a thread, and sends an alert when something happens to one."""

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
from headway.watch.view import RunView, Snapshot

_LOOK_S = 10.0
_LEAVE_S = 10.0
"""how long leaving waits for alerts that are being sent"""
_LOST_LOOKS = 3
"""a file system that stalls makes a run look lost for a while"""
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
    """Watches runs until its block is left. What had happened before is no news, and gets no alert.

    `find` returns the runs; it is called every time, so that new ones are seen, too.

    >>> with AlertWatch(lambda: runs_under("runs"), sender):
    ...     watch(runs, console)
    """

    def __init__(
        self, find: Callable[[], Sequence[Run]], sender: AlertSender, *, look_s: float = _LOOK_S
    ) -> None:
        self._find, self._sender, self._look_s = find, sender, look_s
        self._views: dict[str, RunView] = {}
        self._over: dict[str, int] = {}  # attempts of the runs that are over
        self._lost: dict[str, int] = {}  # how often in a row a run looked lost
        self._has_looked = False
        self._unread: set[str] = set()  # runs of the first look that could not be read
        self._problems: dict[str, str] = {}  # what was reported, and still is the case, by run
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="headway alerts")

    def __enter__(self) -> AlertWatch:
        self.look()  # what is over now was so before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self.look()  # the run that was shown may have ended since
        self._sender.wait(_LEAVE_S)

    def look(self) -> None:
        """Looks at all runs once, and starts to send what is to be sent."""
        try:
            runs = self._find()
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

    def _report(self, key: str, problem: str) -> None:
        """Reports a problem once for as long as it lasts."""
        if self._problems.get(key) != problem:
            self._problems[key] = problem
            self._sender.report(problem)

    def _look_at(self, run: Run) -> None:
        if run.id in self._over:
            attempts = (read_json(run.info_file) or {}).get("attempts") or ()
            if len(attempts) == self._over[run.id]:
                return
            del self._over[run.id]  # it was started again
        was_before = not self._has_looked or run.id in self._unread
        view = self._views.get(run.id) or self._views.setdefault(run.id, RunView(run))
        snapshot = view.refresh()
        is_over = snapshot.header.state in OVER
        self._lost[run.id] = self._lost.get(run.id, 0) + 1 if snapshot.header.state == "lost" else 0
        if not was_before and 0 < self._lost[run.id] < _LOST_LOOKS:
            return
        if is_over:
            self._over[run.id] = snapshot.header.attempts
            del self._views[run.id]
        if (alert := find_alert(run, snapshot)) and not (was_before and is_over):
            self._sender.send(run, alert)

    def _run(self) -> None:
        while not self._leaving.wait(self._look_s):
            self.look()


def find_alert(run: Run, snapshot: Snapshot) -> Alert | None:
    """The alert that the state of a run calls for, whether or not it was sent."""
    header = snapshot.header
    event = _EVENTS.get(header.state)
    if event is not None:
        why = snapshot.failure.error if snapshot.failure else header.why
        return Alert.of(run, event, attempts=header.attempts, why=why, step=header.step)
    if header.silent_s is None:
        return None
    why = f"nothing was written for {format_duration(header.silent_s)}"
    return Alert.of(run, "silent", attempts=header.attempts, why=why, step=header.step)
