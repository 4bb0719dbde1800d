"""`WindowTrace`: the trace of some steps on one rank, from its first batch to the files in `traces/`."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway import dist
from headway.data.counters import Span, SpanSource
from headway.errors import StorageError
from headway.system import files
from headway.system.log import logger
from headway.train.diagnose.trace_summary import summarize

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState

_MAX_EVENTS = 1_000_000
"""of a file: viewers have trouble with more"""
_MAX_SPANS = 200_000
_MAX_HISTORY = 200_000
"""allocations of the device's memory"""
_CLOCK, _CLOCK_MARKS = "headway/clock", 5
_LOADER_PID = "loaders"


@final
class WindowTrace:
    """Traces from its construction until `save`, which writes the files and prints the summary."""

    def __init__(self, state: LoopState, *, memory: bool) -> None:
        self._stage, self._pipe, self._memory = state.name, state.pipe, memory
        self._cuda = state.device.type == "cuda"
        self._first = self._last = state.run.steps_done + 1
        self._annotation: record_function | None = None
        self._step = 0
        self._spans: list[tuple[str, Span]] = []
        self._sources = {
            name: each for name, each in self._pipe.datasets.items() if isinstance(each, SpanSource)
        }
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        if memory and self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_HISTORY)
        self._profile = profile(activities=activities, profile_memory=memory, record_shapes=False)
        self._profile.start()
        with record_function("headway/warm-up"):  # the first annotation takes a millisecond
            pass
        self._clock_s, self._clock_mark = _mark_clock()
        for name, source in self._sources.items():
            source.observe_spans(self._listener(name))

    def _listener(self, name: str) -> Any:
        def add(span: Span) -> None:
            if len(self._spans) < _MAX_SPANS:
                self._spans.append((name, span))

        return add

    def wait_for_data(self, step: int) -> None:
        """Marks that the loop waits for a batch of `step`."""
        if step != self._step:
            self.pause()
        self._annotate("headway/data")

    def begin_step(self, step: int) -> None:
        """Marks that a batch of `step` has arrived."""
        self._step = self._last = step
        self._annotate(f"headway/step {step}")

    def end_pass(self, step: int) -> None:
        """Marks that there are no more batches; `step` is still to be done if it has had any."""
        if step == self._step:
            self.begin_step(step)
        else:
            self.pause()

    def pause(self) -> None:
        """Ends the current mark."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _annotate(self, name: str) -> None:
        self.pause()
        self._annotation = record_function(name)
        self._annotation.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Ends the trace without writing it."""
        self.pause()
        for source in self._sources.values():
            source.observe_spans(None)
        self._profile.stop()
        if self._memory and self._cuda:
            torch.cuda.memory._record_memory_history(enabled=None)

    def save(self) -> None:
        """Ends the trace, writes its files and prints the summary; a failed write loses only the trace."""
        run, rank = self._pipe.directory, self._pipe.world.rank
        snapshot = torch.cuda.memory._snapshot() if self._memory and self._cuda else None
        self.stop()
        with dist.no_hang_check():
            try:
                document = self._document()
                summary = summarize(
                    document["traceEvents"],
                    self._profile.key_averages(),
                    title=f"steps {self._first:,} to {self._last:,} of stage {self._stage!r}, rank {rank}",
                    device=str(self._pipe.device),
                )
                run.check_owner()
                trace = run.trace_file(self._first, self._last, rank)
                with files.storage(f"write {trace}"):
                    files.write_atomic(trace, gzip.compress(json.dumps(document).encode(), 5))
                    if snapshot is not None:
                        _write_snapshot(
                            snapshot, run.trace_file(self._first, self._last, rank, "-memory.pickle")
                        )
                    text = f"{summary}\ntrace: {trace} (open it at https://ui.perfetto.dev)\n"
                    files.write_atomic(run.trace_file(self._first, self._last, rank, ".txt"), text.encode())
            except StorageError as error:
                logger.warning(f"the trace of steps {self._first} to {self._last} is lost: {error}")
                return
            print(text, flush=True)

    def _document(self) -> dict[str, Any]:
        """Returns the trace as Perfetto and chrome://tracing read it, with the spans of the loaders on its clock."""
        document = self._export()
        events = document["traceEvents"]
        document["traceEvents"] = _longest(events) + self._loader_events(events)
        world = self._pipe.world
        document["headway"] = {
            "run": self._pipe.directory.id,
            "stage": self._stage,
            "rank": world.rank,
            "world_size": world.world_size,
            "host": world.host,
            "first_step": self._first,
            "last_step": self._last,
            "events": len(events),
        }
        return document

    def _export(self) -> dict[str, Any]:
        """Returns the trace that torch writes; raises `StorageError` if the temporary directory is full."""
        doing = "export the trace to a temporary directory (TMPDIR)"
        with files.storage(doing), tempfile.TemporaryDirectory() as directory:
            exported = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(exported))
            try:
                document: dict[str, Any] = json.loads(exported.read_bytes())
            except ValueError as error:  # torch reports no error when the disk is full
                raise StorageError(
                    f"{exported} is incomplete: check the space there, or set TMPDIR"
                ) from error
            return document

    def _loader_events(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        clock = next((each["ts"] for each in events if each.get("name") == self._clock_mark), None)
        if clock is None or not self._spans:
            return []
        shift = clock - self._clock_s * 1e6
        label = {
            "ph": "M",
            "name": "process_name",
            "pid": _LOADER_PID,
            "tid": 0,
            "args": {"name": _LOADER_PID},
        }
        names = {span.thread: name for name, span in self._spans}
        threads = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": _LOADER_PID,
                "tid": tid,
                "args": {"name": f"{name} {tid}"},
            }
            for tid, name in names.items()
        ]
        spans = [
            {
                "ph": "X",
                "cat": "loader",
                "name": f"{name}/{span.phase}",
                "pid": _LOADER_PID,
                "tid": span.thread,
                "ts": round(span.began * 1e6 + shift, 3),
                "dur": round((span.ended - span.began) * 1e6, 3),
            }
            for name, span in self._spans
            if span.ended >= self._clock_s  # spans that began before the window may end in it
        ]
        return [label, *threads, *spans]


def _mark_clock() -> tuple[float, str]:
    """Marks the trace; returns the time of the mark by the loaders' clock, and its name.

    Of several marks, the shortest is used: this thread was interrupted least there.
    """
    found = []
    for number in range(_CLOCK_MARKS):
        name, before = f"{_CLOCK} {number}", time.perf_counter()
        with record_function(name):
            pass
        found.append((time.perf_counter() - before, before, name))
    return min(found)[1:]


def _longest(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all events, or the longest ones and all marks if there are too many for a viewer."""
    if len(events) <= _MAX_EVENTS:
        return events
    shortest = sorted((each.get("dur", 0.0) for each in events), reverse=True)[_MAX_EVENTS]
    return [each for each in events if each.get("dur", 0.0) > shortest or each.get("ph") == "M"]


def _write_snapshot(snapshot: Any, path: Path) -> None:
    import pickle  # the one format that https://pytorch.org/memory_viz reads

    files.write_atomic(path, pickle.dumps(snapshot))
