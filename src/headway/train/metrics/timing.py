"""Where a step's time goes, measured without waiting for the device.

On the CPU a clock is read when one kind of work ends and the next begins. On a GPU the host runs ahead, so events are
put into the stream instead; they are read at log points, where the device has just been waited for anyway. "data" is
then the time in which the GPU had nothing to do because the next batch was not there.

Even a look at a clock takes a microsecond or two where operations before it have emptied the caches, and an event
takes forty. So of brief steps one between two log points is measured, and counts for all of them; the loop does nothing
in the others.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal, final

import torch

Phase = Literal["data", "compute", "backward", "optimizer", "wait", "validation", "checkpoint", "other"]
"""waiting for the loader; forward; backward; clipping and stepping; waiting for other ranks at a log point; ..."""

BRIEF = 0.05
"""seconds; of steps that take less, not all are measured"""
SAMPLE = 50
"""but one in so many, or one of each log point where these are closer"""
_AT_LOG_POINTS = ("wait", "other")
_IN_A_STEP = ("data", "compute", "backward", "optimizer")


@final
class Split:
    """The time of one rank, split by what it was spent on.

    >>> split = Split(torch.device("cpu"))
    >>> split.mark("data")
    >>> split.mark("compute")
    >>> split.take().keys()
    dict_keys(['data', 'compute'])
    """

    def __init__(self, device: torch.device, *, alone: bool = True) -> None:
        self.every = 1
        """one step in so many is to be measured"""
        self.measuring = False
        self._cuda, self._alone = device.type == "cuda", alone
        self._seconds: dict[str, float] = {}
        self._steps = 0  # that were measured, or are stood for by one that was
        self._phase: Phase = "other"
        self._since, self._weight = 0.0, 1
        self._events: list[tuple[Phase, int, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []

    def mark(self, phase: Phase, weight: int = 1) -> None:
        """What was under way ends here, and `phase` begins, whose time counts `weight` times."""
        if self._alone and phase in _AT_LOG_POINTS and not self.measuring:
            return  # there is nobody to wait for
        self._turn(phase, weight)
        self.measuring = True
        if phase == "compute":
            self._steps += weight

    def rest(self) -> None:
        """What was under way ends here, and what comes now is not measured."""
        if self.measuring:
            self._turn("other", 0)
            self.measuring = False

    def take(self, most: int = SAMPLE) -> dict[str, float]:
        """Seconds per phase since the last call. On a GPU: call it when the device was just waited for.

        Of brief steps, one in `most` will be measured from now on.
        """
        if self._cuda:
            self._read_events()
        elif self.measuring:
            self._turn(self._phase, self._weight)
        taken, self._seconds = self._seconds, {}
        most = min(most, SAMPLE)
        if self._steps >= most:
            step = sum(taken.get(phase, 0.0) for phase in _IN_A_STEP) / self._steps
            self.every = most if step < BRIEF else 1
        self._steps = 0
        return taken

    def _turn(self, phase: Phase, weight: int) -> None:
        if self._cuda:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((phase, weight, event))
            return
        now = time.perf_counter()
        if self.measuring:
            self._add(self._phase, self._weight * (now - self._since))
        self._phase, self._weight, self._since = phase, weight, now

    def _add(self, phase: Phase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _read_events(self) -> None:
        done = self._events
        # what is still under way belongs to the next interval
        while done and not done[-1][2].query():  # type: ignore[no-untyped-call]
            done = done[:-1]
        for (phase, weight, begin), (_, _, end) in pairwise(done):
            if weight:
                self._add(phase, weight * begin.elapsed_time(end) / 1e3)
        if done:
            self._events = self._events[len(done) - 1 :]
            self._spare.extend(event for _, _, event in done[:-1])
