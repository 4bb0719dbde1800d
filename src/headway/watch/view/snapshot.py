"""The state of a run at one moment, in plain values: the blocks that terminal, report and page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from headway.plan.report.saved_plan import PlanComparison
from headway.watch.view.series import Series


@final
@dataclass(frozen=True, kw_only=True)
class Header:
    """Identity and state of a run."""

    id: str
    name: str
    path: str
    state: str
    """as in `headway runs`, or "starting" before the first row of an attempt"""
    why: str
    is_certain: bool
    """False while a heartbeat on another machine, or a scheduler that does not answer, may still change the state"""
    step: int | None
    total_steps: int | None
    """the step at which the current stage ends"""
    first_step: int
    """the step at which the current stage began"""
    stage: str | None
    epoch: int | None
    """counted from 1"""
    max_epochs: int | None
    created: float
    began: float
    """when the first attempt started, or else when the run was created"""
    elapsed_s: float
    """total time of all attempts"""
    eta_s: float | None
    silent_s: float | None
    """seconds without a row or an event, if that is unusually long"""
    attempts: int
    job: str | None
    nodes: int
    world_size: int
    device: str

    @property
    def progress(self) -> float | None:
        """How much of the current stage is done, from 0 to 1."""
        if self.step is None or not self.total_steps or self.total_steps <= self.first_step:
            return None
        return min(1.0, max(0.0, (self.step - self.first_step) / (self.total_steps - self.first_step)))


@final
@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast the run is, and where the time of its recent steps goes."""

    samples_per_s: float | None = None
    step_median_s: float | None = None
    step_p95_s: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """fraction of the time by phase; they add up to 1"""
    mfu: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank, at its newest log points."""

    rank: int
    host: str
    relative: float | None
    """its own time (data and forward pass), divided by the median of all ranks"""
    data_share: float | None
    """fraction of the time in which it waits for data"""
    memory_peak: int | None
    step: int
    is_straggler: bool = False
    """slower than the others at each of its newest log points"""
    gpu: Mapping[str, Any] = field(default_factory=dict)
    """the newest sample of its GPU"""


@final
@dataclass(frozen=True, kw_only=True)
class DatasetRow:
    """One registered loader, by its counters on rank 0."""

    name: str
    samples: int
    bad: int | None
    cache_hits: float | None
    """fraction of opened shards that were in the node cache"""
    mixture: Sequence[tuple[str, float, float]] = ()
    """dataset, share of the samples, weight"""


@final
@dataclass(frozen=True, kw_only=True)
class Safety:
    """What would be lost if the run ended now."""

    step: int | None = None
    """of the newest whole checkpoint"""
    age_s: float | None = None
    size_bytes: int | None = None
    save_s: float | None = None
    limit_left_s: float | None = None
    """seconds to the time limit of the job"""


@final
@dataclass(frozen=True, kw_only=True)
class RunMessage:
    """A warning or another event of a run that people should see."""

    time: float
    kind: str
    rank: int
    text: str


@final
@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of the first rank that failed."""

    rank: int | None
    host: str
    step: int | None
    error: str
    traceback: Sequence[str]


@final
@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All blocks of one run at one moment."""

    time: float
    header: Header
    curves: Mapping[str, Series]
    speed: Speed
    plan: Sequence[PlanComparison]
    """planned and measured numbers"""
    ranks: Sequence[RankRow]
    """the slowest first"""
    nodes: Sequence[Mapping[str, Any]]
    """the newest device sample of each node"""
    data: Sequence[DatasetRow]
    safety: Safety
    messages: Sequence[RunMessage]
    failure: Failure | None
