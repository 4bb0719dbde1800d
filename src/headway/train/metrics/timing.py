"""Timing of the phases of a step, without waiting for the device.

On the CPU the timer reads a clock when one phase ends and the next begins. On a GPU the host runs ahead, so the timer
records events in the stream instead and reads them at log points, where the host has just waited for the device anyway.
"data" is then the time in which the GPU was idle because the next batch was not ready.

Reading a clock costs a microsecond or two when the operations before it have emptied the caches, and an event costs 40.
So the timer measures only one of the short steps between two log points, and counts it for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, final

import torch

Phase = Literal["data", "compute", "backward", "optimizer", "wait", "validation", "checkpoint", "other"]
"""waiting for the loader; forward; backward; clipping and stepping; waiting for other ranks at a log point; ..."""

SHORT_STEP_S = 0.05
"""shorter steps are not all measured"""
SAMPLE_STEPS = 50
"""one in this many short steps is measured, or one between two log points if these are closer"""
_MAX_EVENTS_KEPT = 4096
"""events that are kept until a log point; when there are more, finished ones are read and reused"""
_AT_LOG_POINTS = ("wait", "other")
_IN_A_STEP = ("data", "compute", "backward", "optimizer")

# What `mark_step` is in steps that are not measured: a built-in that does nothing, because it is called three times in
# each of them and a Python function costs a frame.
_no_op: Callable[[Phase], object] = frozenset[Phase]().__contains__


@final
class PhaseTimer:
    """Measures how long one rank spends in each phase.

    >>> timer = PhaseTimer(torch.device("cpu"))
    >>> timer.mark("data")
    >>> timer.mark("compute")
    >>> timer.take().keys()
    dict_keys(['data', 'compute'])
    """

    def __init__(self, device: torch.device, *, alone: bool = True) -> None:
        self.every = 1
        """one step in this many is measured"""
        self.measuring = False
        self.mark_step: Callable[[Phase], object] = _no_op
        """the same as `mark`, within a step; does nothing in steps that are not measured"""
        self._cuda, self._alone = device.type == "cuda", alone
        self._seconds: dict[str, float] = {}
        self._steps = 0  # that were measured, or are represented by one that was
        self._phase: Phase = "other"
        self._since_s, self._weight, self._step_weight = 0.0, 1, 1
        self._events: list[tuple[Phase, int, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._off = False

    def begin_step(self, weight: int) -> None:
        """Begins the next step with its wait for data. The step counts `weight` times; with 0 it is not measured."""
        self._step_weight = weight
        self.mark_step = self._mark_step if weight else _no_op
        if weight:
            self._mark("data", weight)
        else:
            self.stop()

    def mark(self, phase: Phase) -> None:
        """Ends the current phase and begins `phase`."""
        if self._off or (self._alone and phase in _AT_LOG_POINTS and not self.measuring):
            return  # a single rank waits for no other
        self._mark(phase, 1)

    def _mark_step(self, phase: Phase) -> None:
        self._mark(phase, self._step_weight)

    def _mark(self, phase: Phase, weight: int) -> None:
        self._switch(phase, weight)
        self.measuring = True
        if phase == "compute":
            self._steps += weight

    def stop(self) -> None:
        """Ends the current phase; what follows is not measured."""
        if self.measuring:
            self._switch("other", 0)
            self.measuring = False

    @contextmanager
    def interrupted_by(self, phase: Phase) -> Iterator[None]:
        """Counts the time within as `phase`, or as phases marked there, and then continues the interrupted phase."""
        measuring, before, weight = self.measuring, self._phase, self._weight
        self._mark(phase, 1)
        try:
            yield
        finally:
            if measuring:
                self._switch(before, weight)
            else:
                self.stop()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Measures nothing within: outside a run, nothing reads the times."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def take(self, most: int = SAMPLE_STEPS) -> dict[str, float]:
        """Returns seconds per phase since the last call. On a GPU, call it when the host has just waited for it.

        From now on, one in `most` short steps is measured.
        """
        if self._cuda:
            self._read_events()
        elif self.measuring:
            self._switch(self._phase, self._weight)
        taken, self._seconds = self._seconds, {}
        most = min(most, SAMPLE_STEPS)
        if self._steps >= most:
            step_s = sum(taken.get(phase, 0.0) for phase in _IN_A_STEP) / self._steps
            self.every = most if step_s < SHORT_STEP_S else 1
        self._steps = 0
        return taken

    def _switch(self, phase: Phase, weight: int) -> None:
        if self._cuda:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((phase, weight, event))
            if len(self._events) % _MAX_EVENTS_KEPT == 0:  # a validation of 100,000 batches has no log point
                self._read_events()
        else:
            now = time.perf_counter()
            if self.measuring:
                self._add(self._phase, self._weight * (now - self._since_s))
            self._since_s = now
        self._phase, self._weight = phase, weight

    def _add(self, phase: Phase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _read_events(self) -> None:
        done = self._events
        # phases that are still running belong to the next interval
        while done and not done[-1][2].query():  # type: ignore[no-untyped-call]
            done = done[:-1]
        for (phase, weight, begin), (_, _, end) in pairwise(done):
            if weight:
                self._add(phase, weight * begin.elapsed_time(end) / 1e3)
        if done:
            self._events = self._events[len(done) - 1 :]
            self._spare.extend(event for _, _, event in done[:-1])
