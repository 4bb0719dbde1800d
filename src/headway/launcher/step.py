"""The step of a job that runs its agents, as the job script sees it: srun, a process that should end with them.

It may outlive them. srun waits forever for a task whose slurmstepd was killed, and for a node that crashed and rebooted
before SLURM noticed; the job would keep its nodes until its time limit. So the agents' own records count: once they
show that the launch is over, the step has some time to end, and is then ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from headway.errors import TERMINATED, Stopped
from headway.launcher.agent.launch_records import LaunchRecords, Outcome
from headway.launcher.agent.step_outcome import StepEnd
from headway.launcher.agent.team_watch import SILENT_S
from headway.system.running_clock import RunningClock

_POLL_S = 0.1
_READ_S = 1.0
"""seconds between two looks at the records of the agents"""
_OVER_S = 20.0
"""how long the step may outlive its agents; it needs a few seconds"""
_MISSING_S = 60.0
"""how long an agent may outlive the failure of another; a slow node needs longer than a few seconds"""
_STOPPING_S = 180.0
"""the same after a stop: each agent grants its ranks two minutes, and waits one more for the others"""
_SRUN_S = 60.0
"""how long srun has to end; it gives its tasks KillWait, 30 s by default"""
_FIRST_S = 300.0
"""how long a node may take from the start of the step to its first record: Python is loaded from a busy disk"""
_STOPS = (Stopped.exit_code, TERMINATED)


@final
class Step:
    """The process of the step, a child of this one, and the records that its agents write.

    >>> Step(pid, records, spare_s=60.0).wait()
    StepEnd(status=0, lost=())
    """

    def __init__(
        self,
        pid: int,
        records: LaunchRecords,
        *,
        spare_s: float = 0.0,
        over_s: float = _OVER_S,
        missing_s: float = _MISSING_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._pid, self._records = pid, records
        self._over_s, self._missing_s = over_s + spare_s, missing_s + spare_s
        self._silent_s = silent_s
        self._since: tuple[Path, float] | None = None  # the last round, and since when it has been over
        self._killed_by: int | None = None

    def wait(self, until: Callable[[], object] = lambda: False) -> StepEnd:
        """Waits until the step ends or `until` holds; ends a step that outlives its agents.

        After a stop it returns as soon as all agents have ended: the time of the job may be nearly over.
        """
        next_look = 0.0
        while (status := self._poll()) is None and not until():
            if (now := time.monotonic()) >= next_look:
                next_look = now + _READ_S
                outcome, missing = self._records.outcome(), self._records.missing()
                if outcome and outcome["exit_code"] in _STOPS and not missing:
                    break
                if self._outlives(outcome, missing, now):
                    return StepEnd(status=self._end(until), lost=missing)
            time.sleep(_POLL_S)
        return StepEnd(status=status, killed_by=self._killed_by)

    def wait_prepared(self, until: Callable[[], object] = lambda: False) -> StepEnd:
        """Waits until the step that prepares the nodes, with one process on each, ends or `until` holds.

        Ends the step if a node is silent, and so lost, or if it outlives its processes: srun waits forever for both.
        """
        last_change: dict[int, tuple[object, float]] = {}  # the last record of each node, and when it came
        clock, next_look = RunningClock(longest_s=self._silent_s / 10), 0.0
        while (status := self._poll()) is None and not until():
            if (now := time.monotonic()) >= next_look:
                next_look = now + min(_READ_S, self._silent_s / 20)
                clock.tick()
                found = self._records.preparations()
                for number in range(self._records.size):
                    if number not in last_change or last_change[number][0] != found.get(number):
                        last_change[number] = (found.get(number), now)
                silence_s = {number: clock.since(at) for number, (_, at) in last_change.items()}
                busy = [number for number in last_change if "exit_code" not in found.get(number, {})]
                limit_s = {n: self._silent_s if n in found else _FIRST_S for n in busy}
                lost = tuple(number for number in busy if silence_s[number] > limit_s[number])
                if lost or (not busy and min(silence_s.values()) > self._over_s):
                    ended = self._end(until)
                    codes = [int(facts.get("exit_code", 0)) for facts in found.values()]
                    return StepEnd(status=ended if lost else max(codes), lost=lost)
            time.sleep(_POLL_S)
        return StepEnd(status=status, killed_by=self._killed_by)

    def _outlives(self, outcome: Outcome | None, missing: tuple[int, ...], now: float) -> bool:
        """Whether the agents' records have shown for too long that the launch is over."""
        if outcome is None and missing:
            self._since = None
            return False
        last = self._records.last_round
        if self._since is None or self._since[0] != last:
            self._since = (last, now)
        limit_s = self._missing_s if missing else self._over_s
        if missing and outcome is not None and outcome["exit_code"] == Stopped.exit_code:
            limit_s = _STOPPING_S
        return now - self._since[1] > limit_s

    def _end(self, until: Callable[[], object]) -> int | None:
        """Ends the step by SIGTERM, which srun forwards to its tasks as SIGKILL, and then srun itself by SIGKILL."""
        for number, limit_s in ((signal.SIGTERM, _SRUN_S), (signal.SIGKILL, _SRUN_S)):
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)
            deadline = time.monotonic() + limit_s
            while (status := self._poll()) is None and time.monotonic() < deadline and not until():
                time.sleep(_POLL_S)
            if status is not None or until():
                return status
        return 128 + signal.SIGKILL

    def _poll(self) -> int | None:
        """Returns the exit status in the shell's convention; None while the step runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        if code < 0:  # srun itself was killed; a task that is killed gives srun an exit code
            self._killed_by = -code
        return code if code >= 0 else 128 - code
