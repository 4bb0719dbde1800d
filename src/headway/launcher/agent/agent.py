"""The node agent: starts the ranks of this node, and sees to it that they live and die together.

It is a plain process without torch, so it is up at once and cannot be taken down by what takes a rank down. Ranks that
use headway end each other within moments when one fails (see `headway.dist.control.hub`); the agent is there for those
that cannot, for the exit code, and for the last words. On several nodes the agents know of each other (`team`), and the
first to fail decides.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import final

import psutil

from headway.checkpoint.format import manifest
from headway.dist.failure import heartbeat
from headway.errors import INTERRUPTED, TERMINATED, HeadwayError, Stopped, UsageError
from headway.launcher.agent.environment import Seating, cpu_shares, kernel_caches, rank_environment
from headway.launcher.agent.outcome import crashed, first_failure, keep, words
from headway.launcher.agent.process import Rank, start
from headway.launcher.agent.scratch import scratch_folder
from headway.launcher.agent.team import Outcome, Team
from headway.launcher.agent.watchdog import Watchdog

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOP_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
_POLL = 0.02
_LOOK_EVERY = 0.5
"""seconds between two looks at what the other agents have to say"""
_GRACE = 2.0
"""seconds between a rank's failure, SIGTERM to the rest, and SIGKILL"""
_STOP_GRACE = 60.0
"""the same when a rank has stopped with a checkpoint: the others may still be at it"""
_DEAF = 60.0
"""seconds for which a rank may be too young to hear a stop request, which is therefore repeated"""
_REPEAT_EVERY = 5.0
_RANK_MEMORY = 250 << 20
"""what a process that has imported torch takes at the least"""


@final
class Agent:
    """Runs a command as `processes` ranks on this node. `run` returns the exit code of the whole.

    `team` are the agents of the other nodes. `announce` says whether the last words are this agent's, or those of
    whoever started all agents. A crash is followed by another round, up to `max_restarts` times, if checkpoints in
    the run have grown since this one began. `prepare` is done first, and gives further variables.

    >>> Agent([sys.executable, "train.py"], processes=4).run()
    0
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        environ: Mapping[str, str] = os.environ,
        cwd: str | None = None,
        team: Team | None = None,
        host: str | None = None,
        announce: bool = True,
        max_restarts: int = 0,
        prepare: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        check_processes(processes)
        self._command = list(command)
        self._processes = processes
        self._environ = dict(environ)
        self._cwd = cwd
        self._team = team
        self._host = host
        self._announce = announce
        self._max_restarts = max_restarts
        self._prepare = prepare
        self._running: list[Rank] = []
        self._ended: dict[int, int] = {}  # rank -> return code, in the order in which they ended
        self._pids: dict[int, int] = {}
        self._signals: list[int] = []
        self._repeat: tuple[int, float] | None = None  # a stop request, and when it is next repeated

    def run(self) -> int:
        with scratch_folder() as folder:  # nobody else may read it: it holds the key of the control channel
            return self._run_in(folder)

    def _run_in(self, folder: Path) -> int:
        handlers = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        team = self._team or Team(folder, number=0, size=1)
        try:
            self._environ |= self._prepare()
            seats = team.gather(self._processes, host=self._host)
            for number in itertools.count():
                team.begin_round(number)
                before = self._newest_step()
                outcome = self._round(team, seats, folder / f"heartbeat-{number}")
                if number == self._max_restarts or self._signals or not crashed(outcome):
                    break
                self._follow(folder / f"heartbeat-{number}")
                if not team.agree_on_restart(lambda before=before: self._newest_step() > before):  # type: ignore[misc]
                    break
                print(
                    f"headway: restart {number + 1} of at most {self._max_restarts}",
                    file=sys.stderr,
                    flush=True,
                )
            return int(outcome["exit_code"])
        except SystemExit as told:
            team.ended(int(told.code or 0))
            raise
        finally:
            self._kill(signal.SIGKILL)
            for each, handler in handlers.items():
                signal.signal(each, handler)
            _clear_cache()

    def _follow(self, beats: Path) -> None:
        """The ranks of the next round go on in the run in which those of the last one were."""
        found = (heartbeat.read(beats, rank) for rank in self._pids)
        run = next((beat.run for beat in found if beat and beat.run), None)
        if run is not None:
            self._environ.setdefault("HEADWAY_RUN", run)

    def _newest_step(self) -> int:
        """The step of the newest checkpoint; -1 if there is none, or no run yet."""
        run = self._environ.get("HEADWAY_RUN")
        return max(manifest.steps(Path(run) / "checkpoints"), default=-1) if run else -1

    def _round(self, team: Team, seats: Seating, beats: Path) -> Outcome:
        """Starts the ranks, waits for their end, and agrees with the other agents on what it was."""
        beats.mkdir()
        shares = cpu_shares(seats.processes, self._environ)
        self._ended, self._pids = {}, {}
        for index in range(seats.processes):
            environ = self._environ | rank_environment(seats, index, self._environ)
            if "SLURM_STEP_ID" in self._environ or seats.nodes > 1:
                environ |= kernel_caches(seats.first_local_rank + index, self._environ)
            environ["HEADWAY_RENDEZVOUS"] = str(team.round_folder / "rendezvous.json")
            environ["HEADWAY_HEARTBEAT"] = str(beats)
            rank = start(
                self._command,
                number=seats.first_rank + index,
                environ=environ,
                cwd=self._cwd,
                cpus=shares[index] if shares else None,
            )
            self._running.append(rank)
            self._pids[rank.number] = rank.process.pid
        ranks = range(seats.first_rank, seats.first_rank + seats.processes)
        self._supervise(team, Watchdog(beats, ranks=ranks, world_size=seats.world_size))
        return self._conclude(
            team, seats.world_size, spoken=any(heartbeat.read(beats, rank) for rank in ranks)
        )

    def _supervise(self, team: Team, watchdog: Watchdog) -> None:
        """Waits for all ranks. Once one has failed, here or elsewhere, the others have a grace to leave, then none."""
        deadlines: list[tuple[float, signal.Signals]] = []
        look = time.monotonic() + _LOOK_EVERY
        while self._running:
            now = time.monotonic()
            for rank in [rank for rank in self._running if rank.has_ended()]:
                self._reap(rank)
            code = next((status for status in self._ended.values() if status), 0)
            if not code and team.size > 1 and now >= look:
                look = now + _LOOK_EVERY
                code = int((team.outcome() or {"exit_code": 0})["exit_code"])
            if code and not deadlines:
                grace = _STOP_GRACE if code == Stopped.exit_code else _GRACE
                deadlines = [(now + grace, signal.SIGTERM), (now + 2 * grace, signal.SIGKILL)]
            while deadlines and now >= deadlines[0][0]:
                self._kill(deadlines.pop(0)[1])
            self._repeat_to_the_deaf(now)
            if not self._ended and (hang := watchdog.tick()) is not None:
                keep(hang, team.round_folder / "failure.json")
                self._kill(signal.SIGKILL)
            time.sleep(_POLL)

    def _reap(self, rank: Rank) -> None:
        self._running.remove(rank)  # first: a signal may come in between, and the number may become another's
        status = rank.reap()
        # SLURM and we may both have told it; Python forgets its handlers while it exits, and dies of the second word
        told = -status in _STOP_REQUESTS and -status in self._signals
        self._ended[rank.number] = Stopped.exit_code if told else status

    def _kill(self, number: signal.Signals) -> None:
        for rank in self._running:
            rank.signal_group(number)
        for rank in list(self._running) if number == signal.SIGKILL else ():
            self._reap(rank)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Passes a signal on to the ranks; a second Ctrl-C means now."""
        again = number == signal.SIGINT and signal.SIGINT in self._signals
        self._signals.append(number)
        waiting = not self._pids  # for the other agents: nobody is there yet
        if waiting and number in (signal.SIGINT, signal.SIGTERM):
            raise SystemExit(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        for rank in self._running:
            if again:
                rank.signal_group(signal.SIGKILL)
            else:
                rank.tell(number)
        if number in _STOP_REQUESTS:
            self._repeat = (number, time.monotonic() + _REPEAT_EVERY)

    def _repeat_to_the_deaf(self, now: float) -> None:
        """A rank that is still importing torch ignores a stop request; it must not miss the only one."""
        if self._repeat is None or now < self._repeat[1]:
            return
        young = [rank for rank in self._running if now - rank.born < _DEAF]
        for rank in young:
            rank.tell(self._repeat[0])
        self._repeat = (self._repeat[0], now + _REPEAT_EVERY) if young else None

    def _conclude(self, team: Team, world_size: int, *, spoken: bool) -> Outcome:
        """Agrees with the other agents on what happened, and says it, once and last.

        `spoken`: the ranks are headway's, and have said themselves that they stopped, and where.
        """
        mine = self._outcome(team)
        code = int(mine["exit_code"])
        first = team.conclude(mine) if code else False
        team.ended(code)
        if code:
            patience = _STOP_GRACE if code == Stopped.exit_code else 2 * _GRACE + 1
        else:
            patience = math.inf if self._max_restarts else 0  # they may need us for another round
        team.await_ends(patience, unless=lambda: signal.SIGTERM in self._signals)
        outcome = team.outcome() if code or patience else None
        if first and self._announce and not (spoken and code == Stopped.exit_code):
            print(words(mine, world_size), end="", file=sys.stderr, flush=True)
        if first:
            team.spoke()
        elif code and self._announce:
            team.await_words(_GRACE)  # mpirun ends them all with the first that leaves
        return outcome or mine

    def _outcome(self, team: Team) -> Outcome:
        """How the ranks of this agent ended."""
        if not any(self._ended.values()):
            return {"exit_code": INTERRUPTED if signal.SIGINT in self._signals else 0, "record": None}
        record = first_failure(team.round_folder / "failure.json", self._ended, self._pids)
        if record["kind"] == "vanished" and record["rank"] not in self._ended:
            team.await_outcome(_GRACE)  # its own agent knows better what it died of
        if record["exit_code"] == Stopped.exit_code:
            return {"exit_code": Stopped.exit_code, "record": record}
        if signal.SIGINT in self._signals:
            return {"exit_code": INTERRUPTED, "record": None}
        if signal.SIGTERM in self._signals:
            return {"exit_code": TERMINATED, "record": None}
        return {"exit_code": int(record["exit_code"]), "record": record}


def _clear_cache() -> None:
    """Ranks that were killed leave copies of shards in this node's memory, unless others still use them."""
    from headway.data.cache.node_cache import NodeCache  # imported here: most runs have none

    with suppress(HeadwayError):  # it is the user's to see: headway cache ls
        NodeCache(patience=1.0).sweep()


def check_processes(processes: int) -> None:
    """Refuses what cannot work before anything is started."""
    if processes < 1:
        raise UsageError(f"--nproc {processes}: at least one process is needed")
    room = max(1, psutil.virtual_memory().available // _RANK_MEMORY)
    if processes > room:
        raise UsageError(
            f"--nproc {processes}: this machine's free memory holds about {room} processes with torch; ask for fewer"
        )
