"""The profiler of a stage: a window of steps, traced by `torch.profiler`, with the spans of the loaders beside it.

    stage.enable_profiler(steps="20-25")         or, for a script that is not edited, HEADWAY_PROFILE=20-25

Outside the window, no Python function is called: the batches before and after it come through `itertools`, which has no
frames, and the generator that starts and stops the trace is entered only for the window itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, final

from headway.errors import UsageError
from headway.system import environment
from headway.system.log import logger
from headway.system.text import plural
from headway.train.diagnose.window_trace import WindowTrace

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState

_MAX_STEPS = 1000
"""the longest window: a longer trace is of no use in a viewer"""
_END = object()


@final
@dataclass(frozen=True, kw_only=True)
class ProfilerSettings:
    """Which steps are traced, on which ranks, and whether with memory."""

    steps: str | int
    """the first and the last, from 1, as in "20-25", or one step alone"""
    ranks: Sequence[int] = (0,)
    memory: bool = False
    of_run: bool = False
    """whether steps are those of the run, counted through all stages, rather than of the stage"""

    def __post_init__(self) -> None:
        given: object = self.ranks  # a caller without a type checker may give anything
        ranks = tuple(given) if isinstance(given, Iterable) else (None,)
        if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
            raise UsageError(f"ranks={given!r}: give the numbers of ranks, such as (0, 1)")
        object.__setattr__(self, "ranks", ranks)
        _ = self.window

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last step."""
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", str(self.steps))
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last or isinstance(self.steps, bool):
            raise UsageError(
                f'{self.steps!r:.80} is not a window of steps: give the first and the last, such as "20-25"'
            )
        if last - first >= _MAX_STEPS:
            raise UsageError(
                f"a window of {last - first + 1:,} steps is too long: give at most {_MAX_STEPS:,}"
            )
        return first, last


def asked_window() -> ProfilerSettings | None:
    """Returns the window of HEADWAY_PROFILE; None if it is not set. Raises `UsageError` if it is not a valid window."""
    text = os.environ.get(environment.PROFILE)
    try:
        return ProfilerSettings(steps=text, of_run=True) if text else None
    except UsageError as error:
        raise UsageError(f"{environment.PROFILE}: {error}") from None


@contextmanager
def profiling(state: LoopState) -> Iterator[None]:
    """Surrounds all epochs of a stage: traces the window of HEADWAY_PROFILE or of its settings, on some ranks."""
    asked, settings = asked_window(), state.profiler_settings
    if asked is not None and settings is not None:
        logger.info(
            f"{environment.PROFILE}={asked.steps} is traced instead of steps {settings.steps} of stage {state.name!r}"
        )
        settings = replace(settings, steps=asked.steps, of_run=True)
    settings = settings or asked
    if settings is None or state.pipe.world.rank not in settings.ranks:
        yield
        return
    state.profiler = profiler = StageProfiler(state, settings)
    try:
        yield
        profiler.finish()
    finally:
        profiler.cancel()
        state.profiler = None


@final
class StageProfiler:
    """Starts and stops the trace of one stage as the loop takes batches."""

    def __init__(self, state: LoopState, settings: ProfilerSettings) -> None:
        self._state, self._settings = state, settings
        self._first, self._last = settings.window
        self._trace: WindowTrace | None = None
        self._over = False
        """whether the window has been traced, or was passed before this stage began"""
        resumed = not settings.of_run or state.steps_done > 0  # else an earlier stage has run those steps
        if self._steps_done >= self._last:
            self._over = True
            if resumed:
                logger.info(
                    f"{self._what} is not traced: this attempt resumes from step {self._steps_done:,}"
                )
        elif self._steps_done >= self._first:
            self._first = self._steps_done + 1
            if resumed:
                logger.info(
                    f"{self._what} is traced from step {self._first:,} on: this attempt resumes there"
                )

    @property
    def _what(self) -> str:
        first, last = self._settings.window
        return f"the window {first}-{last} of stage {self._state.name!r}"

    @property
    def _steps_done(self) -> int:
        return self._state.run.steps_done if self._settings.of_run else self._state.steps_done

    def wrap(self, batches: Iterator[Any], per_step: int) -> Iterator[Any]:
        """Returns the batches of a pass; those of the window come through a generator that traces them."""
        if self._over:
            return batches
        before = max(0, self._first - 1 - self._steps_done) * per_step
        return chain(islice(batches, before), self._window(batches), batches)

    def _window(self, batches: Iterator[Any]) -> Iterator[Any]:
        run = self._state.run
        # when passes run side by side, another one counts steps, too
        while self._steps_done < self._first - 1:
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
        if self._trace is None and not self._over:
            self._trace = WindowTrace(self._state, memory=self._settings.memory)
        while self._trace is not None and self._steps_done < self._last:
            self._trace.wait_for_data(run.steps_done + 1)
            batch = next(batches, _END)
            if batch is _END:
                self._trace.end_pass(run.steps_done + 1)
                return  # the loop may run one more step, from an accumulation that is not full
            self._trace.begin_step(run.steps_done + 1)
            yield batch
        self.stop_if_over()

    def stop_if_over(self) -> None:
        """Ends the trace if the last step of the window is done; called at the end of a pass."""
        if self._trace is not None:
            self._trace.pause()
            if self._steps_done >= self._last:
                self._end()

    def finish(self) -> None:
        """Ends the trace at the end of the stage, and logs a window that was not traced, or not to its end."""
        is_last = not self._settings.of_run or self._state.stage is self._state.pipe.stages[-1]
        if self._trace is not None:
            if self._steps_done < self._last and is_last:
                logger.info(f"{self._what} ends early: the stage ended after step {self._steps_done:,}")
            self._end()
        elif not self._over and is_last:
            done = plural(self._steps_done, "step")
            logger.warning(f"{self._what} was not traced: the stage ended after {done}")

    def _end(self) -> None:
        assert self._trace is not None
        trace, self._trace, self._over = self._trace, None, True
        trace.save()

    def cancel(self) -> None:
        """Ends the trace without a file: an exception has ended the stage."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
