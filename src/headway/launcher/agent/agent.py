"""The node agent: starts the ranks of this node, and ends all of them when one fails.

It is a plain process without torch, so it starts at once, and what ends a rank does not end it. Ranks that use headway
end each other within moments when one fails (see `headway.dist.control.hub`); the agent ends those that cannot, returns
the exit code, and reports how the launch ended. The agents of several nodes share their outcomes (`team`), and the
first to fail decides.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import final

import psutil

from headway import schedulers
from headway.checkpoint.format.directory import list_steps
from headway.dist.control.signals import STOP_REQUESTS, STOP_SIGNALS, handled_signals
from headway.dist.failure import heartbeat
from headway.dist.failure.hang import format_ranks
from headway.errors import INTERRUPTED, TERMINATED, HeadwayError, Stopped, UsageError
from headway.launcher.agent.environment import AgentPlacement, cpu_shares, kernel_caches, rank_environment
from headway.launcher.agent.foreground import Foreground
from headway.launcher.agent.launch_records import Outcome
from headway.launcher.agent.outcome import first_failure, is_crash, reason, record_failure, summary
from headway.launcher.agent.process import RankProcess, start_rank, work_in_child
from headway.launcher.agent.scratch import scratch_directory
from headway.launcher.agent.stderr import StderrRelay
from headway.launcher.agent.team import Team
from headway.launcher.agent.watchdog import Watchdog, with_run
from headway.run import Run
from headway.run.info import format_time
from headway.run.paths import RunPaths
from headway.run.status import describe_failure
from headway.system import environment, files
from headway.system.limits import raise_open_files
from headway.system.log import logger, print_last

_POLL_S = 0.02
_TEAM_POLL_S = 0.5
"""seconds between two reads of the other agents' records"""
_GRACE_S = 2.0
"""seconds between a rank's failure, SIGTERM to the rest, and SIGKILL"""
_STOP_GRACE_S = 60.0
"""the same after a rank has stopped with a checkpoint: the others may still be writing theirs"""
_DRAIN_S = 2.0
"""how long the output of ranks that have ended may take to be read: a process that one has left may keep it open"""
_STARTUP_S = 60.0
"""seconds that a rank may take to install its signal handlers; until then a stop request is repeated"""
_REPEAT_S = 5.0
_UNKILLABLE_S = 60.0
"""how long a killed rank may take to end, say to free the memory of its GPU; after that it is stuck in the kernel"""
_LEAVE_S = 2.0
"""the same after a second Ctrl-C, and again for the record of how the run ended"""
_RANK_MEMORY_BYTES = 250 << 20
"""the least that a process which has imported torch needs"""


@final
class Agent:
    """Runs a command as `nproc` ranks on this node; `run` returns the exit code of the whole launch.

    `team` connects it with the agents of the other nodes. With `report=False`, the process that started all agents
    prints how the launch ended. A crash is followed by another round, up to `max_restarts` times, if there is a newer
    checkpoint than when the round began. `prepare` is called first, and returns further variables; `finish` is called
    last. `grace_s` is how long ranks have to end by themselves after one has failed; the other agents' records are read
    every `team_poll_s`, and a stop request is repeated to starting ranks every `repeat_s`.

    >>> Agent([sys.executable, "train.py"], nproc=4).run()
    0
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        nproc: int,
        environ: Mapping[str, str] = os.environ,
        cwd: str | None = None,
        team: Team | None = None,
        host: str | None = None,
        report: bool = True,
        max_restarts: int = 0,
        prepare: Callable[[], Mapping[str, str]] = dict,
        finish: Callable[[], object] = lambda: None,
        grace_s: float = _GRACE_S,
        team_poll_s: float = _TEAM_POLL_S,
        repeat_s: float = _REPEAT_S,
    ) -> None:
        self._command = list(command)
        self._nproc = nproc
        self._environ = dict(environ)
        self._cwd = cwd
        self._team = team
        self._host = host
        self._report = report
        self._max_restarts = max_restarts
        self._prepare = prepare
        self._finish = finish
        self._grace_s = grace_s
        self._team_poll_s = team_poll_s
        self._repeat_s = repeat_s
        self._began = format_time(datetime.now(UTC))
        self._running: list[RankProcess] = []
        self._relay = StderrRelay()  # of this round
        self._foreground: Foreground | None = None
        self._ended: dict[int, int] = {}  # rank -> return code, in the order in which they ended
        self._pids: dict[int, int] = {}
        self._signals: list[int] = []
        self._held: list[int] | None = None  # signals that have arrived while a rank is started
        self._terminated = ""  # the time of the first SIGTERM, as failure records write it
        self._leave_at: float | None = None  # when to exit without the ranks, after a second Ctrl-C
        self._repeat: tuple[int, float] | None = None  # a stop request, and when to repeat it

    @property
    def was_signaled(self) -> bool:
        """Whether a signal has requested the ranks to stop or to end."""
        return bool(self._signals)

    def run(self) -> int:
        signals = handled_signals(STOP_SIGNALS)
        handlers = {number: signal.signal(number, self._forward) for number in signals}
        try:
            raise_open_files()
            # nobody else may read it: it holds the control channel's key
            with scratch_directory() as directory:
                return self._run_in(directory)
        finally:
            for number in signals:  # a scheduler may repeat its signal, which would replace the exit code
                signal.signal(number, lambda received, _: self._signals.append(received))
            _clear_cache()
            self._finish()
            # after a stop, this process exits, and Python then resets handlers of its own before it has ended
            ignored = {signal.SIGTERM, signal.SIGHUP, *STOP_REQUESTS} if self._signals else set()
            for number, handler in handlers.items():
                final = signal.SIG_IGN if number in ignored and handler == signal.SIG_DFL else handler
                signal.signal(number, final)

    def _run_in(self, directory: Path) -> int:
        team = self._team or Team(directory, number=0, size=1)
        try:
            self._environ |= self._prepare()
            placement = team.gather(self._nproc, host=self._host)
            for number in itertools.count():
                self._begin_round(team, number)
                before, beats = self._newest_step(), directory / f"heartbeat-{number}"
                outcome = self._round(team, placement, beats)
                # an agent that is silent, or has failed itself, cannot start its ranks again
                lost = (outcome["record"] or {}).get("kind") in ("lost", "agent")
                if number == self._max_restarts or self._signals or lost or not is_crash(outcome):
                    break
                self._keep_run(beats)
                if not team.agree_on_restart(partial(self._may_restart, before)):
                    break
                logger.warning("restart %d of at most %d", number + 1, self._max_restarts)
            code, status = int(outcome["exit_code"]), self._ended.get(0, 1)
            if code == 1 and self._is_alone:  # as without headway
                return status if status > 0 else 128 - status
            return code
        except SystemExit as stop:
            code = int(stop.code or 0)
            team.mark_ended(code)
            team.conclude({"exit_code": code, "record": None})  # other agents' ranks would wait for these
            raise
        except Exception as error:
            # without a record the end of the other agents, by srun, would be taken for the cause
            team.fail(error)
            raise
        finally:
            self._kill(signal.SIGKILL)
            team.end_watch()

    def _begin_round(self, team: Team, number: int) -> None:
        """Begins a round. Until a rank has started, a signal that ends ranks ends this agent: see `_forward`."""
        team.begin_round(number)
        self._pids = {}
        for received in self._signals:  # after the ranks of the last round had ended
            _end_unless_request(received)

    def _end_attempt(self, beats: Path, own: Outcome) -> None:
        """Records how the attempt ended if rank 0 could not, because it was killed or ran out of time."""
        beat = heartbeat.read(beats, 0)
        path = (beat and beat.run) or self._environ.get(environment.RUN)
        if path is None or 0 not in self._pids:
            return
        try:
            run = Run.open(path).held_as(beat.owner if beat else None)
            step = beat.step if beat else None
            run.end_killed_attempt(self._pids[0], int(own["exit_code"]), why=reason(own), step=step)
        except HeadwayError as error:  # the disk may be what failed; the next attempt records it
            logger.error("%s", error)

    def _keep_run(self, beats: Path) -> None:
        """Makes the ranks of the next round resume the run of the last one."""
        run = self._run_of(beats)
        if run is not None:
            self._environ.setdefault(environment.RUN, run)

    def _run_of(self, beats: Path) -> str | None:
        readings = (heartbeat.read(beats, rank) for rank in self._pids)
        return next((beat.run for beat in readings if beat and beat.run), None)

    def _why_resumable(self, beats: Path) -> str | None:
        """Returns a sentence if the run of the ranks had stopped or was done; None if its training was cut short."""
        path = self._run_of(beats)
        if path is None:
            return None
        try:
            run = Run.open(path)
            last = run.info()["attempts"][-1]
        except (HeadwayError, IndexError):
            return None
        # ranks that end before they train name the run, too; its last attempt is then one of an earlier launch
        if last["status"] == "stopped" and last["started"] >= self._began:
            return f"{run.id} had stopped before SIGTERM ended its script: started again, it resumes"
        if last["status"] != "done" or last.get("script_ended", True):
            return None
        return (
            f"stopped by SIGTERM when {run.id} was finished: the same command restores it and runs the rest of "
            "the script"
        )

    def _newest_step(self) -> int | None:
        """Returns the step of the newest checkpoint; -1 if there is none, None while the run is not known."""
        run = self._environ.get(environment.RUN)
        return max(list_steps(RunPaths(path=Path(run)).checkpoints_dir), default=-1) if run else None

    def _may_restart(self, before: int | None) -> bool:
        """Whether the round has saved a later step than `before`, the newest one when it began."""
        newest = self._newest_step()
        if self._signals or newest is None:
            return False
        if before is None:
            before = self._first_step()
        return newest > max(before, 0)  # the checkpoint of step 0 is saved before any training

    def _first_step(self) -> int:
        """Returns the step at which the attempt of this round resumed its run."""
        try:
            attempts = Run.open(self._environ[environment.RUN]).info()["attempts"]
        except HeadwayError:
            return 0
        last = attempts[-1] if attempts else {}
        if last and last.get("pid") != self._pids.get(0):
            return self._newest_step() or 0  # rank 0 has not begun one, and so has saved nothing
        # a loop of the user's own does not record where it resumed: at best from the newest checkpoint at the time
        return int(last.get("step_started", last.get("newest_step", 0)))

    def _round(self, team: Team, placement: AgentPlacement, beats: Path) -> Outcome:
        """Starts the ranks, waits until they end, and agrees with the other agents on the outcome."""
        with files.storage(f"make {beats}"):
            beats.mkdir()
        shares = cpu_shares(placement.nproc, self._environ)
        self._ended, self._pids = {}, {}
        relay = self._relay = StderrRelay()
        self._foreground = Foreground() if self._is_alone else None
        for index in range(placement.nproc):
            environ = self._environ | rank_environment(placement, index, self._environ)
            if schedulers.node(self._environ) or placement.nodes > 1:
                environ |= kernel_caches(placement.first_local_rank + index, self._environ)
            environ[environment.RENDEZVOUS] = str(team.round_dir / "rendezvous.json")
            environ[environment.HEARTBEAT] = str(beats)
            self._start(
                placement.first_rank + index,
                environ,
                shares[index] if shares else None,
            )
        relay.start()
        ranks = range(placement.first_rank, placement.first_rank + placement.nproc)
        self._supervise(team, Watchdog(beats, ranks=ranks, world_size=placement.world_size))
        if self._leave_at is not None:
            return self._leave(team, beats)
        relay.finish(_DRAIN_S)
        managed = any(heartbeat.read(beats, rank) for rank in ranks)
        own = self._outcome(team, beats)
        self._end_attempt(beats, own)
        return self._conclude(team, own, placement.world_size, managed=managed)

    @property
    def _is_alone(self) -> bool:
        """Whether there is one rank, which is treated as if it had been started without headway."""
        return self._team is None and self._nproc == 1

    def _start(self, number: int, environ: Mapping[str, str], cpus: set[int] | None) -> None:
        stderr = None if self._is_alone else self._relay.open(number)
        try:
            with self._holding_signals():
                rank = start_rank(
                    self._command,
                    number=number,
                    environ=environ,
                    cwd=self._cwd,
                    cpus=cpus,
                    stderr=stderr,
                    foreground=self._foreground,
                )
                self._running.append(rank)
                self._pids[number] = rank.process.pid
        finally:
            if stderr is not None:
                os.close(stderr)

    def _supervise(self, team: Team, watchdog: Watchdog) -> None:
        """Waits for all ranks. Once one has failed, here or elsewhere, the others have a grace period to end."""
        deadlines: list[tuple[float, signal.Signals]] = []
        next_look = time.monotonic() + self._team_poll_s
        while self._running:
            now = time.monotonic()
            for rank in [rank for rank in self._running if rank.has_ended()]:
                self._reap(rank)
            code = next((status for status in self._ended.values() if status), 0)
            if not code and team.size > 1 and now >= next_look:
                next_look = now + self._team_poll_s
                code = int((team.outcome() or {"exit_code": 0})["exit_code"])
            if code and not deadlines:
                grace = _STOP_GRACE_S if code == Stopped.exit_code else self._grace_s
                deadlines = [(now + grace, signal.SIGTERM), (now + 2 * grace, signal.SIGKILL)]
            while deadlines and now >= deadlines[0][0]:
                self._end_late(deadlines.pop(0)[1])
            if self._foreground is not None and self._running:
                self._foreground.follow(self._running[0].process.pid)
            self._repeat_stop_request(now)
            if self._leave_at is not None:
                self._reap_killed()
                return
            found = None if self._ended else watchdog.tick()
            if found is None and not deadlines and (loss := team.loss()) is not None:
                found = with_run(loss, watchdog.beats().values())
            if found is not None:
                work_in_child(partial(record_failure, found, team.failure_file), _UNKILLABLE_S)
                self._kill(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _reap(self, rank: RankProcess) -> None:
        self._running.remove(rank)  # first: a signal may arrive in between, and the pid may be reused
        status = rank.reap()
        # the scheduler and this agent may both have signaled it; Python drops its handlers while it exits, so that the
        # second signal ends it
        was_stopped = -status in STOP_REQUESTS and -status in self._signals
        self._ended[rank.number] = Stopped.exit_code if was_stopped else status
        if self._foreground is not None:
            self._foreground.leave()
            if status == -signal.SIGINT:  # by the terminal, which does not tell this process
                self._signals.append(signal.SIGINT)

    def _end_late(self, number: signal.Signals) -> None:
        """Ends the ranks that have not exited in time, and logs which: their output may not say why they end."""
        if self._running:
            late = format_ranks(sorted(rank.number for rank in self._running))
            logger.info("%s did not exit in time after another rank had ended: sending %s", late, number.name)
            self._kill(number)

    def _kill(self, number: signal.Signals) -> None:
        for rank in self._running:
            rank.signal_group(number)
        if number == signal.SIGKILL:
            self._reap_killed()

    def _reap_killed(self) -> None:
        """Waits for ranks that were killed; logs and abandons those that are stuck in the kernel."""
        deadline = time.monotonic() + _UNKILLABLE_S
        while self._running and time.monotonic() < min(deadline, self._leave_at or deadline):
            for rank in [rank for rank in self._running if rank.has_ended()]:
                self._reap(rank)
            time.sleep(_POLL_S)
        for rank in self._running:
            self._ended[rank.number] = rank.process.returncode = -signal.SIGKILL
            logger.error(
                "rank %d (pid %d) was killed but cannot end: it waits in the kernel, for a file system or device, and "
                "ends when that answers",
                rank.number,
                rank.process.pid,
            )
        self._running.clear()

    def _leave(self, team: Team, beats: Path) -> Outcome:
        """Ends after a second Ctrl-C even if a file system blocks: a child process records how the run ended."""
        own: Outcome = {"exit_code": INTERRUPTED, "record": None}

        def record() -> None:
            self._end_attempt(beats, own)
            team.conclude(own)
            team.mark_ended(INTERRUPTED)

        if not work_in_child(record, _LEAVE_S):
            logger.error("how the run ended could not be recorded: its file system does not answer")
        if self._report and team.number == 0:
            print_last(summary(own, self._nproc))
        return own

    @contextmanager
    def _holding_signals(self) -> Iterator[None]:
        """Handles signals that arrive in the context at its end, when the new rank is known.

        What a handler raises during a fork is lost: Python ignores exceptions in the functions that it calls after it.
        """
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
            for number in held:
                self._forward(number, None)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Forwards a signal to the ranks; a second Ctrl-C kills them."""
        if self._held is not None:
            self._held.append(number)
            return
        kill = number == signal.SIGINT and signal.SIGINT in self._signals
        self._signals.append(number)
        if number == signal.SIGTERM and not self._terminated:
            self._terminated = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not self._pids:  # no rank has been started yet: this agent waits for the others
            _end_unless_request(number)
        for rank in self._running:
            if kill:
                rank.signal_group(signal.SIGKILL)
            else:
                rank.signal(number)
        if kill:
            self._leave_at = time.monotonic() + _LEAVE_S
        if number in STOP_REQUESTS:
            self._repeat = (number, time.monotonic() + self._repeat_s)

    def _repeat_stop_request(self, now: float) -> None:
        """Repeats a stop request to ranks that may still be importing torch, and ignore it until then."""
        if self._repeat is None or now < self._repeat[1]:
            return
        starting = [rank for rank in self._running if now - rank.started < _STARTUP_S]
        for rank in starting:
            rank.signal(self._repeat[0])
        self._repeat = (self._repeat[0], now + self._repeat_s) if starting else None

    def _conclude(self, team: Team, own: Outcome, world_size: int, *, managed: bool) -> Outcome:
        """Agrees with the other agents on the outcome, and reports it once, after all other output.

        `own` is the outcome of this agent's ranks. With `managed`, they use headway, and report a stop themselves.
        """
        code = int(own["exit_code"])
        first = team.conclude(own) if code else False
        team.mark_ended(code)
        if code:
            timeout_s = _STOP_GRACE_S if code == Stopped.exit_code else 2 * self._grace_s + 1
        else:
            # the others may need this agent for another round, and agent 0 watches them
            timeout_s = math.inf if self._max_restarts or team.number == 0 else 0
        team.wait_ended(timeout_s, unless=lambda: signal.SIGTERM in self._signals or team.loss())
        if not code and (loss := team.loss()) is not None:
            own = {"exit_code": 1, "record": loss}
            first = team.conclude(own)
        outcome = team.outcome() if code or timeout_s else None
        reports = self._report or team.record_failed
        is_reported = managed and code == Stopped.exit_code and not (own["record"] or {}).get("sentence")
        if first and reports and not is_reported:
            print_last(summary(own, world_size))
        if first and self._report:
            team.mark_reported()
        elif code and self._report:
            team.wait_reported(self._grace_s)  # mpirun ends all agents when the first one exits
        return outcome or own

    def _outcome(self, team: Team, beats: Path) -> Outcome:
        """Returns how the ranks of this agent ended."""
        if not any(self._ended.values()):  # a signal that came too late has changed nothing
            return {"exit_code": 0, "record": None}
        record = first_failure(team.failure_file, self._ended, self._pids, self._relay.ranks)
        if record.get("echo"):
            team.wait_outcome(self._grace_s)  # the cause may be a rank of another agent
        if record["kind"] == "vanished" and record["rank"] not in self._ended:
            team.wait_outcome(self._grace_s)  # the agent of that rank has its exit status
        if record["exit_code"] == Stopped.exit_code:
            return {"exit_code": Stopped.exit_code, "record": record}
        if not {signal.SIGINT, signal.SIGTERM} & set(self._signals):
            return {"exit_code": int(record["exit_code"]), "record": record}
        interrupted = signal.SIGINT in self._signals
        # a cause that the ranks found explains more than the signal; but a job that could not save is queued again, and
        # so is one that failed because of the signal: a handler raised, or the signal ended a process of the script
        found, sentence = record["kind"] in ("exception", "hang"), record.get("sentence")
        if found and (interrupted or not (sentence or record.get("time", "") > self._terminated)):
            return {"exit_code": int(record["exit_code"]), "record": record}
        if interrupted:
            return {"exit_code": INTERRUPTED, "record": None}
        if (resumable := self._why_resumable(beats)) is not None:
            record |= {"sentence": resumable, "exit_code": Stopped.exit_code}
            return {"exit_code": Stopped.exit_code, "record": record}
        if found and not sentence:
            sentence = record["sentence"] = f"stopped by SIGTERM; then {describe_failure(record)}"
        # a sentence explains why the ranks could not save before they ended
        return {"exit_code": TERMINATED, "record": record if sentence else None}


def _end_unless_request(number: int) -> None:
    """Exits on a signal that would have ended the ranks; a stop request waits until there are ranks."""
    if number not in STOP_REQUESTS:
        raise SystemExit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


def _clear_cache() -> None:
    """Removes the shards that killed ranks left in this node's memory, unless other processes use them."""
    from headway.data.cache.node_cache import NodeCache  # imported here: most runs have none

    with suppress(HeadwayError):  # headway cache ls shows what is left
        NodeCache(patience=1.0).sweep()


def check_nproc(nproc: int, option: str = "--nproc") -> None:
    """Refuses a number of processes that cannot work, before anything is started."""
    if nproc < 1:
        raise UsageError(f"{option} {nproc}: expected at least one process")
    room = max(1, psutil.virtual_memory().available // _RANK_MEMORY_BYTES)
    if nproc > room:
        raise UsageError(
            f"{option} {nproc}: this machine's free memory is enough for about {room} processes with torch; use fewer"
        )
