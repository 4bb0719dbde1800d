"""`Counters`: what a loader did on this rank, as totals that only grow, and as a trace of its phases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, final, runtime_checkable

from headway.system.files import storage, write_atomic

PHASES = ("read", "decode", "transform")
_MAX_SPANS = 200_000  # trace viewers have trouble with more


class Span(NamedTuple):
    """The time that one phase took for some samples or a batch, in seconds of `time.perf_counter`."""

    phase: str
    thread: int
    began: float
    ended: float


SpanListener: TypeAlias = Callable[[Span], None]


@runtime_checkable
class SpanSource(Protocol):
    """A loader that calls a listener with each span of reading, decoding and transforming samples, and of waiting."""

    def observe_spans(self, listener: SpanListener | None) -> None: ...


@final
class Counters:
    """Totals of samples, bytes and seconds of one rank. Only the training loop's thread updates them."""

    def __init__(self) -> None:
        self.samples = self.batches = self.bytes_read = self.bytes_decoded = self.read_retries = 0
        self.trace: LoaderTrace | None = None
        self.listener: SpanListener | None = None
        self._seconds: dict[str, float] = {}

    def add(self, span: Span) -> None:
        """Adds the time of a span to the total of its phase."""
        self._seconds[span.phase] = self._seconds.get(span.phase, 0.0) + span.ended - span.began
        if self.trace is not None:
            self.trace.add(span)
        if self.listener is not None:
            self.listener(span)

    def open_trace(self, path: str | Path | None, *, rank: int) -> None:
        """Starts a trace of all spans, unless there is one; within a run, the path is relative to its directory."""
        if path is not None and self.trace is None:
            from headway.dist.shared_run import current_run  # needs torch

            run = current_run()
            self.trace = LoaderTrace(Path(path) if run is None else run.path / path, rank=rank)

    def save_trace(self) -> None:
        """Writes the trace, if there is one."""
        if self.trace is not None:
            self.trace.save()

    def add_phases(self, thread: int, times: Sequence[float]) -> None:
        """Adds consecutive phases, given when the first began and when each ended; later phases may be missing."""
        for phase, (began, ended) in zip(PHASES, pairwise(times), strict=False):
            self.add(Span(phase, thread, began, ended))

    def totals(self) -> dict[str, float]:
        """Returns all totals by name."""
        counts = {
            "samples": self.samples,
            "batches": self.batches,
            "bytes_read": self.bytes_read,
            "bytes_decoded": self.bytes_decoded,
            "read_retries": self.read_retries,
        }
        return counts | {f"seconds/{phase}": round(value, 6) for phase, value in self._seconds.items()}


@final
class LoaderTrace:
    """Spans for a trace viewer (chrome://tracing, Perfetto), with a row per thread."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path = path.with_name(f"{path.stem}-rank-{rank:05d}.json")
        self._rank = rank
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        """Keeps a span, up to a limit."""
        if len(self._spans) < _MAX_SPANS:
            self._spans.append(span)

    def save(self) -> None:
        """Writes all spans so far, replacing the file."""
        events = [
            {
                "name": span.phase,
                "cat": "data",
                "ph": "X",
                "pid": self._rank,
                "tid": span.thread,
                "ts": round(span.began * 1e6, 1),
                "dur": round((span.ended - span.began) * 1e6, 1),
            }
            for span in self._spans
        ]
        with storage(f"write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"traceEvents": events}).encode())
