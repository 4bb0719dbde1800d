"""Reports of a run: rows for the metrics files and a display for people, both updated at log points."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import torch

from headway.checkpoint import SavedCheckpoint
from headway.dist import World
from headway.dist.objects import report_root
from headway.record.events import EventLog
from headway.run import Run
from headway.system.redact import redact_names
from headway.system.text import format_bytes
from headway.train.batches import FirstBatch, count_batches
from headway.train.metrics.display import Display, ProgressSnapshot, open_display
from headway.train.metrics.history import HistoryRow
from headway.train.metrics.meter import LogPoint
from headway.train.model.parallel import RegisteredModel

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState


@runtime_checkable
class CountingLoader(Protocol):
    """A loader that counts what it has done so far."""

    def counters(self) -> dict[str, float]: ...


@final
class Reporter:
    """Writes and shows the progress of a run. Every rank writes its times; rank 0 writes the metrics as well."""

    def __init__(self, run: Run, world: World, events: EventLog) -> None:
        self._world, self._events = world, events
        self.rows = run.open_rows(run.metrics_file(world.rank), content="metric rows")
        self._display: Display | None = None
        self._since = time.monotonic()  # the last log point or validation
        self._stage_start, self._first_step = self._since, 0  # of the current stage in this process
        self._shown: dict[str, Any] = {}  # the newest value of each metric
        self._counting: dict[str, CountingLoader] | None = None
        self._targets: dict[str, dict[str, float]] = {}  # the weights of each mixture
        self._peak, self._peak_at = 0, float("-inf")  # of the device's memory, and when it was read
        self._ended: ProgressSnapshot | None = None  # an epoch that is not shown yet
        self._rate: float | None = None
        self.data_wait: float | None = None
        """the fraction of the last interval in which this rank waited for data; None before the first log point"""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.rows.close()

    def print_inputs(self, models: Iterable[RegisteredModel], datasets: Mapping[str, Iterable[Any]]) -> None:
        """Prints one line per model and per dataset."""
        for model in models:
            report_root(model.describe())
        for name, loader in datasets.items():
            batches = count_batches(loader, None)
            count = "unknown number of" if batches is None else f"{batches:,}"
            fake = ", each the first one (HEADWAY_FAKE_DATA)" if isinstance(loader, FirstBatch) else ""
            report_root(f"dataset {name}: {count} batch{'es' * (batches != 1)}{fake}")

    @contextmanager
    def displaying(self, state: LoopState) -> Iterator[None]:
        """Shows the progress of a stage within the context."""
        self._since = self._stage_start = time.monotonic()
        self._first_step, self._shown, self._rate, self.data_wait = state.steps_done, {}, None, None
        self._counting = None
        with ExitStack() as stack:
            if self._world.is_root:
                self._display = open_display()
                stack.callback(self._display.close)
            stack.callback(self.show_epoch)  # of an epoch whose hook has failed
            yield

    def log_point(
        self, state: LoopState, kind: str, point: LogPoint, seconds: Mapping[str, float], step: int
    ) -> None:
        """Writes the row of a log point or a validation, and updates the display."""
        now = time.monotonic()
        row: dict[str, Any] = {
            "kind": kind,
            "time": time.time(),
            "stage": state.name,
            "epoch": state.epoch,
            "step": step,
            "metrics": redact_names(point.values) if self._world.is_root else {},
            "rank_metrics": redact_names(point.local),
            "host": self._world.host,
            "seconds": {phase: round(value, 6) for phase, value in seconds.items()},
        }
        if kind == "train":
            elapsed = now - self._since
            self._rate = state.samples / elapsed * point.data_ranks if elapsed > 0 else None
            whole = sum(seconds.values())
            self.data_wait = seconds.get("data", 0.0) / whole if whole else None
            row["samples_per_second"] = self._rate
            row["busy_seconds"] = round(state.run.busy_s, 6)  # of this rank; readers compare ranks
            if self._world.is_root and (checkpointer := state.run.checkpointer) is not None:
                row["checkpoint_age_seconds"] = checkpointer.checkpoint_age_s
        self._since = now
        if self._counting is None:  # once per stage, since isinstance with a protocol takes many microseconds
            self._counting = {
                name: each for name, each in state.pipe.datasets.items() if isinstance(each, CountingLoader)
            }
            self._begin_stage(state, step)
        if self._counting:
            row["data"] = {name: loader.counters() for name, loader in self._counting.items()}
            self._note_weights(row["data"], step)
        if self._world.device.type == "cuda":
            row["memory_peak"] = self._memory_peak(now)
        self.rows.write(row)
        self._shown.update(point.values)
        # a validation at the start is always shown: the next update may take a while
        at_start = kind == "validation" and not state.steps_done
        if self._display is not None and (at_start or self._display.due(now)):
            self._display.update(self._snapshot(state, step))

    def record_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Writes the row and the event of a complete save: how long it stalled training, and how long it took."""
        facts = {
            "step": saved.step,
            "stall_seconds": round(saved.stall_s, 6),
            "total_seconds": round(saved.total_s, 6),
            "bytes": saved.bytes,
        }
        self.rows.write({"kind": "checkpoint", "time": time.time(), **facts})
        size = format_bytes(saved.bytes)
        self._events.write(
            "checkpoint", f"saved step {saved.step:,}: {size} in {saved.total_s:.1f} s", **facts
        )

    def _begin_stage(self, state: LoopState, step: int) -> None:
        """Writes the event with the length of a stage, for readers, at its first log point."""
        if self._world.is_root:
            self._events.write(
                "stage",
                f"stage {state.name} trains",
                stage=state.name,
                step=step,
                first_step=step - state.steps_done,
                total_steps=state.total_steps(),
                max_epochs=state.max_epochs,
            )

    def _note_weights(self, counters: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Writes an event if the weights of a mixture have changed since the last log point."""
        if not self._world.is_root:
            return
        for name, totals in counters.items():
            now = {key[7:]: value for key, value in totals.items() if key.startswith("target/")}
            if now and self._targets.setdefault(name, now) != now:
                weights = ", ".join(f"{key} {value:.3g}" for key, value in now.items())
                self._events.write(
                    "weights", f"{name} has new mixture weights: {weights}", step=step, weights=now
                )
            self._targets[name] = now

    def _memory_peak(self, now: float) -> int:
        """Returns the peak of the device's memory, read at most once per second because it takes some 100 us."""
        if now - self._peak_at > 1.0:
            self._peak, self._peak_at = torch.cuda.max_memory_allocated(self._world.device), now
        return self._peak

    def end_epoch(self, state: LoopState, row: HistoryRow) -> None:
        """Writes the row of an epoch; `show_epoch` shows it."""
        self._shown.update(row.values)
        if self._world.is_root:
            self._write_epoch(row, row.values)
        self._ended = self._snapshot(state, row.step)

    def _write_epoch(self, row: HistoryRow, values: Mapping[str, Any], **more: Any) -> None:
        place = {"stage": row.stage, "epoch": row.epoch, "step": row.step}
        self.rows.write(
            {"kind": "epoch", "time": time.time(), **place, "metrics": redact_names(values), **more}
        )

    def show_epoch(self) -> None:
        """Shows the epoch that has ended, after `post_epoch` has added its metrics."""
        if self._display is not None and self._ended is not None:
            self._display.end_epoch(self._ended)
        self._ended = None

    def extend_epoch(self, row: HistoryRow, point: LogPoint) -> None:
        """Writes metrics that were logged after the row of an epoch as another row of the same epoch."""
        self._shown.update(point.values)
        values = point.values if self._world.is_root else {}
        if values or point.local:
            self._write_epoch(row, values, rank_metrics=dict(point.local))

    def _snapshot(self, state: LoopState, step: int) -> ProgressSnapshot:
        total, done = state.total_steps(), state.steps_done - self._first_step
        pace = (time.monotonic() - self._stage_start) / done if done > 0 else None
        checkpointer = state.run.checkpointer
        return ProgressSnapshot(
            stage=state.name,
            epoch=state.epoch + 1,
            max_epochs=state.max_epochs,
            step=step,
            values=self._shown,
            columns=state.columns,
            samples_per_second=self._rate,
            data_wait=self.data_wait,
            seconds_left=None if pace is None or total is None else max(0, total - state.steps_done) * pace,
            checkpoint_age_s=checkpointer.checkpoint_age_s if checkpointer else None,
        )
