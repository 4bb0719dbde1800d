"""A plan against its run: measured memory and step time are compared with the plan at log points."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, final

import torch

from headway.errors import HeadwayError
from headway.plan.report.saved_plan import PlanComparison, PlannedKey, SavedPlan, read_saved_plan
from headway.run.info import to_json
from headway.system import files
from headway.system.log import logger
from headway.train.callback import Callback
from headway.train.metrics.meter import LogPoint

if TYPE_CHECKING:
    from headway.train.diagnose.traced_plan import ForkedTrace
    from headway.train.loop_state import LoopState
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage

_INTERVALS = 3
"""intervals between log points to measure before the first comparison: the first steps are slow"""
_MAX_INTERVALS = 15
_PLAN_TIMEOUT_S = 60.0
"""how long a failure waits for the plan that its report quotes"""


def with_plan(state: LoopState, kind: str, point: LogPoint) -> LogPoint:
    """Adds the ratios of measured to planned values to the metrics: each rank its own, and rank 0 writes its row."""
    ratios: dict[str, float] = {}
    for callback in state.run.callbacks:
        if isinstance(callback, PlanCheck):
            ratios |= callback.measure(state, kind)
    return replace(point, values={**point.values, **ratios}) if ratios else point


@final
class PlanCheck(Callback):
    """Logs `plan/step` and `plan/memory`, measured over planned, and warns once if one is outside its interval.

    Each rank measures its own, which needs no exchange; the rows have those of rank 0. Without a plan, rank 0 traces
    the step of the first stage while it trains.
    """

    def __init__(self, plan: str | Path | SavedPlan | None = None) -> None:
        self.plan = plan if isinstance(plan, SavedPlan) or plan is None else read_saved_plan(plan)
        self._trace: ForkedTrace | None = None
        self._since: tuple[float, int] | None = None  # time and steps of the last log point
        self._step_s: list[float] = []
        self._warned: set[str] = set()

    def pre_run(self, pipe: Pipeline) -> None:
        if self.plan is not None:
            self._keep(pipe)
        elif pipe.directory.plan_file.exists():  # the plan of an earlier attempt
            self.plan = read_saved_plan(pipe.directory.plan_file)

    def pre_stage(self, stage: Stage) -> None:
        if self.plan is None and stage is stage.pipe.stages[0] and stage.pipe.world.is_root:
            self._trace = _start_trace(stage)

    def pre_epoch(self, stage: Stage) -> None:  # noqa: ARG002
        self._since = None

    def post_run(self, pipe: Pipeline) -> None:  # noqa: ARG002
        if self._trace is not None:
            self._trace.close()

    def await_plan(self, state: LoopState) -> None:
        """Waits for a plan that is being traced, if there is one."""
        self._take_trace(state, wait_s=_PLAN_TIMEOUT_S)

    def _take_trace(self, state: LoopState, *, wait_s: float = 0.0) -> None:
        """Takes the plan from the process that traces the step, if it is done."""
        if self._trace is None or state.stage is not state.pipe.stages[0]:
            return
        if state.batch is None or not (
            state.in_step or state.steps_done > state.logged_at or self._trace.asked
        ):
            return  # a validation at the start comes before any batch of training
        trace, self._trace = self._trace, None
        try:
            trace.ask(state.batch)
            self.plan = trace.answer(wait_s=wait_s)
        except HeadwayError as error:
            logger.warning("the run has no plan: %s", error, extra={"event": "plan"})
        else:
            if self.plan is None:
                self._trace = trace  # it is still tracing
            else:
                self._step_s = []  # steps were slower while the process traced
                self._keep(state.pipe)

    def _keep(self, pipe: Pipeline) -> None:
        """Writes the plan into the run directory, once."""
        assert self.plan is not None
        if pipe.world.is_root and pipe.directory.is_ours() and not pipe.directory.plan_file.exists():
            files.write_atomic(pipe.directory.plan_file, to_json(self.plan.content))

    def measure(self, state: LoopState, kind: str) -> dict[str, float]:
        """Returns the ratios of measured to planned values; call it at every log point."""
        if kind != "train":
            self._since = None  # an interval with a validation does not measure a step
            return {}
        now, steps = time.monotonic(), state.run.steps_done
        if self._since is not None and steps > self._since[1]:
            step_s = (now - self._since[0]) / (steps - self._since[1])
            self._step_s = [*self._step_s, step_s][-_MAX_INTERVALS:]
        self._since = now, steps
        self._take_trace(state)
        if self.plan is None:
            return {}
        measured: dict[PlannedKey, float | None] = {}
        if len(self._step_s) >= _INTERVALS:
            measured["step"] = median(self._step_s)
        if state.device.type == "cuda":
            measured["memory"] = float(torch.cuda.max_memory_allocated(state.device))
        compared = self.plan.compare(measured)
        for each in compared:
            self._warn(state, each)
        return {f"plan/{each.what}": each.ratio for each in compared if each.ratio is not None}

    def _warn(self, state: LoopState, found: PlanComparison) -> None:
        if found.what in self._warned or found.measured is None or not found.differs:
            return
        self._warned.add(found.what)
        if state.pipe.world.is_root:
            what = "step time" if found.what == "step" else "memory of rank 0"
            text = found.planned.sentence(what, found.measured)
            text += self._part(state) if found.what == "step" else ""
            logger.warning("the run differs from its plan: %s", text, extra={"event": "plan"})

    def _part(self, state: LoopState) -> str:
        """Returns which part of the step differs: the plan has no wait for data."""
        waited = state.run.reporter.data_wait
        if waited is not None and waited > 0.1:
            return f"; {waited:.0%} of the step is spent waiting for data, which the plan does not include"
        return "; hardly any of it is spent waiting for data: the device or the exchange of ranks differs"


def _start_trace(stage: Stage) -> ForkedTrace | None:
    """Begins to trace the step of a stage; warns with the reason if that is not possible."""
    from headway.train.diagnose.traced_plan import ForkedTrace
    from headway.train.train_val import TrainValStage

    split = [name for name, model in stage.pipe.registered_models.items() if model.sharded]
    if isinstance(stage, TrainValStage) and not split:
        return ForkedTrace(stage._loop)
    why = (
        f"model {split[0]!r} is split over ranks" if split else f"stage {stage.name!r} has a loop of its own"
    )
    logger.warning(
        "the run has no plan: %s, so its step cannot be traced; save one with `headway plan ... --save plan.json`",
        why,
        extra={"event": "plan"},
    )
    return None
