"""`RunView`: the state of a run, kept up to date by reading what was added to its directory."""

from __future__ import annotations

import heapq
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import StorageError, UsageError
from headway.plan.report.saved_plan import PlanComparison, SavedPlan
from headway.run import Run, lock
from headway.run.info import newest_step
from headway.run.status import Status, status
from headway.schedulers.base import JobIds, Queue
from headway.system.jsonlines import is_count, is_number, is_time
from headway.watch.runs import attempt_spans, job_ids, timestamp
from headway.watch.view.metric_rows import MetricRows
from headway.watch.view.ranks import RankTable
from headway.watch.view.snapshot import Failure, Header, RankRow, RunMessage, Safety, Snapshot, Speed
from headway.watch.view.source import Row, RowTail, clean, clean_indented, read_object

_QUEUE_S = 15.0
"""time between two queries of the scheduler"""
_QUEUE_WAIT_S = 0.4
"""how long the first snapshot waits for the scheduler"""
_HEARTBEAT_WAIT_S = 10.0
LOST_CHECKS = 3
"""consecutive snapshots in which a run must be lost: a file system that stalls makes it look so for a while"""
_MAX_MESSAGES = 200
_MAX_NODES = 4096
_MAX_WARNING_RANKS = 256
_SILENT_S = 30.0
_SILENT_LOG_POINTS = 5
_SILENT_GAPS = 2
"""a run is silent after `_SILENT_LOG_POINTS` times the usual time between log points, `_SILENT_GAPS` times the longest,
and `_SILENT_S`"""
_MESSAGE_KINDS = frozenset(
    {"warning", "straggler", "changes", "plan", "weights", "restart", "stopped", "failed", "interrupted"}
)


@final
class QueueWatcher:
    """Queries the scheduler about the job of a run every 15 s, in a thread: the answer may take a while."""

    def __init__(self, run: Run) -> None:
        self._run, self._queue, self._queried_at = run, Queue(), float("-inf")
        self._job: JobIds | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> Queue:
        """Returns the newest answer. A run that was queued again may have a different job now."""
        now = time.monotonic()
        if now - self._queried_at <= _QUEUE_S or (self._thread is not None and self._thread.is_alive()):
            return self._queue
        before, self._queried_at = self._job, now
        self._job = JobIds.from_submission(read_object(self._run.path, self._run.submission_file))
        if self._job is not None:
            if self._job != before:
                self._queue = Queue(note="the scheduler has not answered yet")
            self._thread = threading.Thread(target=self._query, daemon=True)
            self._thread.start()
            self._thread.join(_QUEUE_WAIT_S if self._job != before else 0.0)
        return self._queue

    def _query(self) -> None:
        self._queue = schedulers.queue([self._job])


@final
class RunView:
    """Reads a run directory. With `thorough`, it reads a long metrics file in full.

    >>> view = RunView(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    >>> view.refresh().header.state
    'running'
    """

    def __init__(self, run: Run, *, thorough: bool = False) -> None:
        self.run = run
        self._thorough = thorough
        self.metrics = MetricRows(run, thorough=thorough)
        self.ranks = RankTable(run)
        # without checkpoints, of which there are many
        self._messages: deque[RunMessage] = deque(maxlen=_MAX_MESSAGES)
        self._tails: dict[str, RowTail] = {}
        self._nodes: dict[str, Row] = {}
        self._stage: Row = {}
        self._checkpoint: Row = {}
        self.attempts: list[Row] = []
        """those of run.json at the last refresh"""
        self._earlier_s = 0.0  # of all attempts but the last
        self._queue = QueueWatcher(run)
        self._beat: tuple[int | None, float] = (None, time.monotonic())
        self._event_time = 0.0
        self._ends: object = None  # the end of the job's time
        self._has_read = False

    def refresh(self) -> Snapshot:
        """Reads what was added since the last call, and returns the state of the run."""
        info = self.info()
        before = len(self.attempts)
        attempts = self.attempts = [each for each in info.get("attempts", []) if isinstance(each, dict)]
        attempt: Row = attempts[-1] if attempts else {}
        started = timestamp(attempt.get("started"))
        world = attempt.get("world") or info.get("world")
        world = world if isinstance(world, dict) else {}
        world_size = _positive(world.get("world_size"))
        if len(attempts) != before:
            self._earlier_s = _total_s(attempt_spans(self.run, attempts, is_running=True)[:-1])
            self.metrics.forget_pace()
            self.metrics.worlds = [_world(each) for each in attempts]
        self.metrics.refresh()
        self._read_events()
        self._read_nodes(started)
        budget_s = inf if self._thorough else 0.15 if self._has_read else 0.4
        self.ranks.refresh(world_size, since=started - 1, budget_s=budget_s)
        self._has_read = True
        now = self._status(info)
        header = self._header(info, attempts, now, world, world_size)
        speed, ranks = self._speed(), self.ranks.rows(self._nodes)
        return Snapshot(
            time=time.time(),
            header=header,
            curves=self.metrics.curves,
            speed=speed,
            plan=self._plan(speed, ranks),
            ranks=ranks,
            nodes=list(self._nodes.values()),
            data=self.metrics.datasets(),
            safety=self._safety(now),
            messages=list(self._messages),
            failure=self._failure() if now.state == "failed" else None,
        )

    # --- files

    def info(self) -> Row:
        """Returns run.json as it is now; empty if it cannot be read."""
        try:
            return self.run.info()
        except UsageError:  # it is being replaced, or damaged: the files beside it can still be shown
            return {}

    def _read_events(self) -> None:
        """Reads the new events of all ranks, and merges them by time."""
        files = [self.run.events_file(0)]
        files += self._listed(self.run.log_dir, r"events-\d{5}\.jsonl")[:_MAX_WARNING_RANKS]
        found = []
        for path in files:
            tail = self._tails.get(str(path))
            if tail is None:
                tail = self._tails[str(path)] = RowTail(self.run.path, path)
                tail.skip_to_end(1 << 20)
            found.append([row for row in tail.read() if _is_event(row)])
        new = list(heapq.merge(*found, key=lambda row: row["time"]))
        for row in new:
            if row.get("kind") == "stage":
                self._stage = row
            elif row.get("kind") == "checkpoint" and is_count(row.get("step")):
                self._checkpoint = row
            elif row.get("kind") in ("start", "restart"):
                self._ends = row.get("ends")
            self._event_time = max(self._event_time, row["time"])
        self._messages.extend(_message(row) for row in new if row["kind"] in _MESSAGE_KINDS)

    def _read_nodes(self, since: float) -> None:
        for path in self._listed(self.run.nodes_dir, r"[\w.-]+\.jsonl")[:_MAX_NODES]:
            tail = self._tails.get(str(path))
            if tail is None:
                tail = self._tails[str(path)] = RowTail(self.run.path, path)
            tail.skip_to_end(1 << 14)
            for row in tail.read(1 << 15):
                if is_time(row.get("time")) and row["time"] >= since:
                    self._nodes[path.stem] = sane_node(row)
        # an earlier attempt may have used other nodes
        self._nodes = {name: row for name, row in self._nodes.items() if row["time"] >= since}

    def _listed(self, directory: Path, pattern: str) -> list[Path]:
        try:
            names = sorted(directory.iterdir())
        except OSError:
            return []
        return [path for path in names if re.fullmatch(pattern, path.name)]

    def _status(self, info: Mapping[str, Any]) -> Status:
        if not info:
            return Status(state="new", why="run.json cannot be read")
        found = status(self.run, self._queue.get(), info)
        if found.state != "running" or found.certain:
            return found
        owner = lock.newest_owner(self.run.lock_dir)
        beat, now = owner.beat if owner else None, time.monotonic()
        if beat != self._beat[0]:
            self._beat = (beat, now)
        quiet_s = now - self._beat[1]
        if quiet_s > _HEARTBEAT_WAIT_S:
            return Status(state="lost", why=f"no heartbeat for {quiet_s:.0f} s", certain=False)
        return found

    # --- blocks

    def _header(
        self,
        info: Mapping[str, Any],
        attempts: list[Row],
        now: Status,
        world: Mapping[str, Any],
        world_size: int,
    ) -> Header:
        last, stage = self.metrics.last, self._stage
        step = last.get("step")
        started = timestamp(attempts[-1].get("started")) if attempts else 0.0
        is_starting = now.state == "running" and (not last or last["time"] < started)
        first, total = stage.get("first_step"), stage.get("total_steps")
        first = first if is_count(first) else 0
        end = max(first + total, step or 0) if is_count(total) else None  # epochs may differ by a batch
        pace = self.metrics.wall_s_per_step
        running = now.state == "running" and not is_starting
        epoch, most = last.get("epoch"), stage.get("max_epochs")
        return Header(
            id=clean(info.get("id", self.run.id), 120),
            name=clean(info.get("name", self.run.name), 80),
            path=str(self.run.path),
            state="starting" if is_starting else now.state,
            why=clean(now.why, 1000),
            is_certain=now.certain,
            step=step,
            total_steps=end,
            first_step=first,
            stage=clean(last["stage"], 60) if "stage" in last else None,
            epoch=epoch + 1 if is_count(epoch) else None,
            max_epochs=most if is_count(most) else None,
            created=timestamp(info.get("created")),
            began=timestamp(attempts[0].get("started") if attempts else None)
            or timestamp(info.get("created")),
            elapsed_s=self._earlier_s
            + _total_s(attempt_spans(self.run, attempts[-1:], is_running=now.state == "running")),
            eta_s=(end - step) * pace if running and end and step is not None and pace else None,
            silent_s=self._silent_s(started) if running else None,
            attempts=len(attempts),
            job=_job(read_object(self.run.path, self.run.submission_file), attempts),
            nodes=_positive(world.get("nodes")),
            world_size=world_size,
            device=clean(world.get("device", ""), 40),
        )

    def _silent_s(self, started: float) -> float | None:
        """Returns the seconds since the last row or event, if that is unusually long; else None.

        Until there are two log points, the time to the first one counts as the usual time between them.
        """
        rows = self.metrics
        usual_s = rows.last["time"] - started if rows.log_point_s is None else rows.log_point_s
        limit_s = max(_SILENT_S, _SILENT_LOG_POINTS * usual_s, _SILENT_GAPS * rows.longest_gap_s)
        silent_s = time.time() - max(rows.last["time"], self._event_time)
        return silent_s if silent_s > limit_s else None

    def _speed(self) -> Speed:
        median, p95 = self.metrics.step_s
        rate, mfu = self.metrics.last.get("samples_per_second"), self.metrics.curves.get("mfu")
        return Speed(
            samples_per_s=float(rate) if is_number(rate) else None,
            step_median_s=median,
            step_p95_s=p95,
            shares=self.metrics.shares,
            mfu=mfu.last if mfu else None,
        )

    def _plan(self, speed: Speed, ranks: Sequence[RankRow]) -> list[PlanComparison]:
        """Compares step time and memory with plan.json; empty without one."""
        plan = SavedPlan(title="", content=read_object(self.run.path, self.run.plan_file))
        peak = max((row.memory_peak for row in ranks if row.memory_peak), default=None)
        return plan.compare({"step": speed.step_median_s, "memory": peak})

    def _safety(self, now: Status) -> Safety:
        saved, ends = self._newest_checkpoint(), self._ends
        return Safety(
            step=saved.get("step"),
            age_s=max(0.0, time.time() - saved["time"]) if saved else None,
            size_bytes=size if is_count(size := saved.get("bytes")) else None,
            save_s=seconds if is_number(seconds := saved.get("total_seconds")) else None,
            limit_left_s=ends - time.time() if is_time(ends) and now.state == "running" else None,
        )

    def _newest_checkpoint(self) -> Row:
        """Returns the newest checkpoint on disk: a crash, or a loop of the script, may have left no event of it."""
        try:
            step = newest_step(self.run.path)
            if step is None or step == self._checkpoint.get("step"):
                return {} if step is None else self._checkpoint
            return {"step": step, "time": self.run.checkpoint_dir(step).stat().st_mtime}
        except (StorageError, OSError):  # it cannot be read, or was removed a moment ago
            return self._checkpoint

    def _failure(self) -> Failure | None:
        record = read_object(self.run.path, self.run.failure_file)
        if not record:
            return None
        lines = str(record.get("traceback") or "")[-20_000:].splitlines()
        return Failure(
            rank=rank if is_count(rank := record.get("rank")) else None,
            host=clean(record.get("host") or "", 60),
            step=step if is_count(step := record.get("step")) else None,
            error=clean(record.get("error", ""), 2000),
            traceback=[clean_indented(line) for line in lines],
        )


def sane_node(row: Row) -> Row:
    """Returns the numbers of a device sample, and its text without control characters."""
    found: Row = {name: value for name, value in row.items() if is_number(value)} | {
        "host": clean(row.get("host"), 60)
    }
    gpus = row.get("gpus")
    found["gpus"] = [
        _sane_gpu(gpu) for gpu in (gpus if isinstance(gpus, list) else [])[:64] if isinstance(gpu, dict)
    ]
    return found


def _sane_gpu(gpu: Row) -> Row:
    reasons = gpu.get("throttling")
    found: Row = {name: value for name, value in gpu.items() if is_number(value)}
    shown = [clean(reason, 40) for reason in (reasons if isinstance(reasons, list) else [])[:8]]
    return found | {"uuid": clean(gpu.get("uuid", ""), 60), "throttling": shown}


def _is_event(row: Row) -> bool:
    return is_time(row.get("time")) and isinstance(row.get("kind"), str)


def _message(row: Row) -> RunMessage:
    rank = row.get("rank")
    return RunMessage(
        time=float(row["time"]),
        kind=clean(row.get("kind"), 20),
        rank=rank if is_count(rank) else 0,
        text=clean(row.get("text", ""), 1000),
    )


def _positive(value: object) -> int:
    """Returns a number of ranks or nodes; 1 if the value is not valid."""
    return value if is_count(value) and value > 0 else 1


def _world(attempt: Row) -> tuple[float, int]:
    """Returns when an attempt started, and its number of ranks."""
    world = attempt.get("world")
    return timestamp(attempt.get("started")), _positive(
        world.get("world_size") if isinstance(world, dict) else 1
    )


def _total_s(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _job(submitted: Row, attempts: list[Row]) -> str | None:
    ids = job_ids(submitted, attempts)
    return clean(ids.number, 40) if ids else None
