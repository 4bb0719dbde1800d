"""What a pipeline tells: rows for the metrics files, a display for people, both made at log points."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import torch

from headway import dist
from headway.checkpoint import SavedCheckpoint
from headway.dist import World
from headway.run import Run
from headway.system.jsonlines import JsonLinesWriter
from headway.train.batches import FirstBatch, length
from headway.train.metrics.display import Display, ProgressSnapshot, display
from headway.train.metrics.meter import LogPoint
from headway.train.model.parallel import RegisteredModel

if TYPE_CHECKING:
    from headway.train.stage import Stage


@runtime_checkable
class Counted(Protocol):
    """A loader that tells what it has done so far."""

    def counters(self) -> dict[str, float]: ...


@final
class Reporter:
    """Writes and shows how a run goes. Every rank writes its times; the root writes the metrics, too."""

    def __init__(self, run: Run, world: World) -> None:
        self._world = world
        self._rows = JsonLinesWriter(run.metrics_file(world.rank), content="metric rows")
        self._display: Display | None = None
        self._since = time.monotonic()  # the last log point or validation
        self._began, self._began_at = self._since, 0  # the stage: when, and at which of its steps
        self._shown: dict[str, Any] = {}  # the newest value of each metric
        self._counted: dict[str, Counted] | None = None
        self._peak, self._peak_at = 0, float("-inf")  # of the device's memory, and when it was asked for
        self._rate: float | None = None
        self._wait: float | None = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def introduce(self, models: Iterable[RegisteredModel], datasets: Mapping[str, Iterable[Any]]) -> None:
        """A line per model and per dataset."""
        for model in models:
            dist.print_root(model.describe())
        for name, loader in datasets.items():
            batches = length(loader, None)
            count = "unknown number of" if batches is None else f"{batches:,}"
            fake = ", each the first one (HEADWAY_FAKE_DATA)" if isinstance(loader, FirstBatch) else ""
            dist.print_root(f"dataset {name}: {count} batch{'es' * (batches != 1)}{fake}")

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Around a stage: its display."""
        self._since = self._began = time.monotonic()
        self._began_at, self._shown, self._rate, self._wait = stage.steps_done, {}, None, None
        self._counted = None
        with ExitStack() as stack:
            if self._world.is_root:
                self._display = display()
                stack.callback(self._display.close)
            yield

    def log_point(
        self, stage: Stage, kind: str, point: LogPoint, seconds: Mapping[str, float], step: int
    ) -> None:
        now = time.monotonic()
        row: dict[str, Any] = {
            "kind": kind,
            "time": time.time(),
            "stage": stage.name,
            "epoch": stage.epoch,
            "step": step,
            "metrics": dict(point.values) if self._world.is_root else {},
            "rank_metrics": dict(point.local),
            "seconds": {phase: round(value, 6) for phase, value in seconds.items()},
        }
        if kind == "train":
            elapsed = now - self._since
            self._rate = stage._loop.samples / elapsed * self._world.world_size if elapsed > 0 else None
            whole = sum(seconds.values())
            self._wait = seconds.get("data", 0.0) / whole if whole else None
            row["samples_per_second"] = self._rate
        self._since = now
        if self._counted is None:  # once for the stage, since it takes many microseconds to ask
            self._counted = {name: each for name, each in stage.datasets.items() if isinstance(each, Counted)}
        if self._counted:
            row["data"] = {name: loader.counters() for name, loader in self._counted.items()}
        if self._world.device.type == "cuda":
            row["memory_peak"] = self._memory_peak(now)
        self._rows.write(row)
        self._shown.update(point.values)
        if self._display is not None and self._display.due(now):
            self._display.update(self._snapshot(stage, step))

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """A save has become whole: how long training stood still for it, and how long it took."""
        self._rows.write(
            {
                "kind": "checkpoint",
                "time": time.time(),
                "step": saved.step,
                "stall_seconds": round(saved.stall_s, 6),
                "total_seconds": round(saved.total_s, 6),
                "bytes": saved.bytes,
            }
        )

    def _memory_peak(self, now: float) -> int:
        """Asked for once a second at most: it takes some hundred microseconds."""
        if now - self._peak_at > 1.0:
            self._peak, self._peak_at = torch.cuda.max_memory_allocated(self._world.device), now
        return self._peak

    def end_epoch(self, stage: Stage, values: Mapping[str, Any], step: int) -> None:
        self._shown.update(values)
        if self._world.is_root:
            self._rows.write(
                {
                    "kind": "epoch",
                    "time": time.time(),
                    "stage": stage.name,
                    "epoch": stage.epoch,
                    "step": step,
                    "metrics": dict(values),
                }
            )
        if self._display is not None:
            self._display.end_epoch(self._snapshot(stage, step))

    def _snapshot(self, stage: Stage, step: int) -> ProgressSnapshot:
        total, done = stage._loop.total_steps(), stage.steps_done - self._began_at
        pace = (time.monotonic() - self._began) / done if done > 0 else None
        return ProgressSnapshot(
            stage=stage.name,
            epoch=stage.epoch + 1,
            max_epochs=stage.max_epochs,
            step=step,
            values=self._shown,
            columns=stage._loop.columns,
            samples_per_second=self._rate,
            data_wait=self._wait,
            seconds_left=None if pace is None or total is None else max(0, total - stage.steps_done) * pace,
        )
