"""Where a step's time goes, measured without waiting for the device.

On the CPU a clock is read when one kind of work ends and the next begins. On a GPU the host runs ahead, so events are
put into the stream instead, in every tenth step, since each takes some microseconds; they are read at log points, where
the device has just been waited for anyway. "data" is then the time in which the GPU had nothing to do because the next
batch was not there.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal, final

import torch

Phase = Literal["data", "compute", "backward", "optimizer", "wait", "validation", "checkpoint", "other"]
"""waiting for the loader; forward; backward; clipping and stepping; waiting for other ranks at a log point; ..."""

SAMPLE = 10
"""On a GPU, one step in so many is measured, and counts for all of them."""
_BEGINNINGS = frozenset({"data", "wait", "checkpoint", "other"})
"""Phases that may begin to be measured where the one before was not."""


@final
class Split:
    """The time of one rank, split by what it was spent on.

    >>> split = Split(torch.device("cpu"))
    >>> split.mark("data")
    >>> split.mark("compute")
    >>> split.take().keys()
    dict_keys(['data', 'compute'])
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0
        self._steps = 0
        self._weight = 0  # how often what is under way counts; 0 if it is not measured
        self._events: list[tuple[Phase, int, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []

    def mark(self, phase: Phase) -> None:
        """What was under way ends here, and `phase` begins."""
        if self._cuda:
            if self._weight or phase in _BEGINNINGS:
                self._mark_event(phase)
            return
        now, under_way = time.perf_counter(), self._phase
        if under_way is not None:
            self._seconds[under_way] = self._seconds.get(under_way, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call. On a GPU: call it when the device was just waited for."""
        if self._cuda:
            self._read_events()
        elif self._phase is not None:
            self.mark(self._phase)
        taken, self._seconds = self._seconds, {}
        return taken

    def _mark_event(self, phase: Phase) -> None:
        before = self._weight
        if phase == "data":  # a step begins
            self._steps += 1
            self._weight = SAMPLE if self._steps % SAMPLE == 2 else 0
        elif phase in ("wait", "checkpoint", "other"):  # rare, so always measured
            self._weight = 1
        if before or self._weight:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((phase, self._weight, event))

    def _read_events(self) -> None:
        done = self._events
        # what is still under way belongs to the next interval
        while done and not done[-1][2].query():  # type: ignore[no-untyped-call]
            done = done[:-1]
        for (phase, weight, begin), (_, _, end) in pairwise(done):
            if weight:
                seconds = weight * begin.elapsed_time(end) / 1e3
                self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if done:
            self._events = self._events[len(done) - 1 :]
            self._spare.extend(event for _, _, event in done[:-1])
