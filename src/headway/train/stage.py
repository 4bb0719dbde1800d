"""`Stage`: a part of a run whose loop is the user's own, and what every stage can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headway import dist
from headway.dist import set_phase
from headway.errors import UsageError
from headway.system.failpoints import armed
from headway.train import batches as feed, loop
from headway.train.batches import Pass
from headway.train.metrics.meter import Meter, Point, Reduction, Scope
from headway.train.resume import rng
from headway.train.resume.state import Stateful
from headway.train.settings import LOG_EVERY

if TYPE_CHECKING:
    from headway.train.metrics.history import History
    from headway.train.pipeline import Pipeline


@runtime_checkable
class EpochMetric(Protocol):
    """What `add_metric` takes: any torchmetrics metric, or an object with these two methods."""

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class Stage(ABC):
    """One part of a run, with a loop of your own.

    `self.batches(name)` gives the batches of a dataset on this rank's device; each round of the loop is one step. It
    brings along timing, log points, progress and stop requests.

        class Gan(hw.Stage):
            def run_epoch(self):
                for real in self.batches("train"):
                    ...
                    self.log("loss_g", loss_g, weight=len(real))

        pipe.append_stage(Gan(), max_epochs=10)
    """

    def __init__(self, *, log_every: int = LOG_EVERY) -> None:
        if log_every < 1:
            raise UsageError(f"log_every={log_every!r}: give the steps between two log points, at least 1")
        self.log_every = log_every
        self.name = type(self).__name__.lower()
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.epoch = 0
        """epochs finished; so, within an epoch, its number from 0"""
        self.steps = 0
        """steps finished in this stage; the run's own count is `pipe.step`"""
        self.samples = 0
        """samples that this rank has trained on since the last log point"""
        self.batch: Any = None
        """the batch that was taken last"""
        self.weight = 1
        """how many steps the next one stands for where time is measured; 0 if it is not measured"""
        self.may_fail = False  # on purpose, in a test
        self.stop_requested = False  # on this rank
        self.stopped = False  # agreed by all ranks
        self.columns: list[str] = []
        self.epoch_metrics: dict[str, EpochMetric] = {}
        self.in_epoch = False
        """an epoch has begun and is not finished"""
        self.epoch_began = 0  # the steps that were finished then
        self.logged_at = -1  # the steps that were finished at the last log point
        # step, loss, samples; since the last log point
        self.recent_losses: list[tuple[int, Tensor, int]] = []
        self.passes: list[Pass] = []
        """over datasets, in this epoch, in the order in which they began"""
        self._passes_begun = 0  # by this process

    # --- what you write

    @abstractmethod
    def run_epoch(self) -> None:
        """One epoch of the stage."""

    def pre_stage(self) -> None:  # noqa: B027
        """Called before the first epoch."""

    def post_stage(self) -> None:  # noqa: B027
        """Called after the last epoch."""

    def pre_epoch(self) -> None:  # noqa: B027
        """Called before each epoch."""

    def post_epoch(self) -> None:  # noqa: B027
        """Called after each epoch, when its metrics are in `self.history`."""

    # --- what you use

    @cached_property
    def pipe(self) -> Pipeline:
        """The pipeline that this stage is part of; it says so when the stage is appended."""
        raise UsageError(f"stage {self.name!r} is not part of a pipeline yet: call pipe.append_stage(stage)")

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The registered models as they are to be called: wrapped in training, bare in validation."""
        return self.pipe.models

    @property
    def datasets(self) -> Mapping[str, Iterable[Any]]:
        return self.pipe.datasets

    @property
    def device(self) -> torch.device:
        return self.pipe.device

    @property
    def config(self) -> Any:
        return self.pipe.config

    @property
    def history(self) -> History:
        return self.pipe.history

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float = 1.0,
        reduce: Reduction = "mean",
        scope: Scope = "global",
    ) -> None:
        """Adds a value to a metric: weighted by `weight`, over all batches and ranks. Nothing is waited for.

        Give the number of samples (or tokens) as `weight`, or a short last batch counts as much as a full one.
        `scope="rank"` keeps a metric on its rank, in that rank's own metrics file.

            self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        """
        self.meter.log(name, value, weight=weight, reduce=reduce, scope=scope)

    def add_metric(self, name: str, metric: EpochMetric) -> None:
        """Computes `metric` at the end of each epoch, on all ranks, and resets it; updating it is up to you.

        For metrics that are no weighted mean, such as an AUROC; torchmetrics bring their own reduction over ranks.
        """
        if not isinstance(metric, EpochMetric):
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__}: add an object with compute() and reset(), such as one "
                "of torchmetrics, or log numbers with self.log()"
            )
        self.epoch_metrics[name] = metric

    def add_column(self, name: str) -> None:
        """Shows a metric in the progress table; `train/loss` and `val/loss` are there already.

        >>> self.add_column("val/accuracy")
        """
        if name not in self.columns:
            self.columns.append(name)

    def stop_stage(self) -> None:
        """Ends this stage early. Any rank may ask; all of them stop at the same step, the next log point or the end of
        the epoch."""
        self.stop_requested = True

    def batches(self, name: str = "train") -> Iterator[Any]:
        """The batches of dataset `name`, on this rank's device. Each round of your loop is one step."""
        loader = self.datasets.get(name)
        if loader is None:
            raise UsageError(missing_dataset(self, name))
        progress, split = self.begin_pass(loader), self.pipe.split
        split.mark("data")
        try:
            for batch in self.feed(loader, progress=progress):
                self.batch = batch
                self.samples += self.count_samples(batch)
                if self.weight:
                    split.mark("compute", self.weight)
                yield batch
                loop.finish_step(self)
                if self.ended:
                    return
                if self.weight:
                    split.mark("data", self.weight)
        finally:
            progress.done = True

    def step_optimizer(self, name: str) -> None:
        """Steps an optimiser of your own loop; its scheduler moves, and the average of its model follows."""
        optimizer = self.pipe.optimizers[name]
        optimizer.step()
        for follow in self.pipe.followers([optimizer]):
            follow()

    def count_samples(self, batch: Any) -> int:
        """How many samples (or tokens) count for this batch; override it if the first tensor's length does not say."""
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(first, Tensor):
            first = feed.first_tensor(batch)
        return first.shape[0] if first is not None and first.ndim else 1

    # --- what the loop uses

    @cached_property
    def meter(self) -> Meter:
        """Where `log` adds to."""
        return Meter(self.device)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        epochs = self.max_epochs is not None and self.epoch >= self.max_epochs
        return self.stopped or epochs or self.steps_done

    @property
    def ended(self) -> bool:
        """Whether no further step is to be made."""
        return self.stopped or self.steps_done

    @property
    def wishes(self) -> int:
        """What this rank wants at a log point."""
        keeper = self.pipe.keeper
        return (loop.STOP if self.stop_requested else 0) | (keeper.flags() if keeper else 0)

    @property
    def begun(self) -> bool:
        return self.in_epoch or self.epoch > 0

    def rests_next(self) -> bool:
        """Whether a validation or the end of the epoch follows the step that was just made."""
        return self.ended or any(each.ends_here and not each.done for each in self.passes[-1:])

    @property
    def steps_done(self) -> bool:
        return self.max_steps is not None and self.steps >= self.max_steps

    def begin_epoch(self) -> None:
        """A new epoch, unless one was under way when the run was stopped."""
        self.may_fail = armed()
        if not self.in_epoch:
            self.in_epoch, self.epoch_began, self.passes = True, self.steps, []
        self._passes_begun = 0

    def begin_pass(self, loader: Iterable[Any], limit: int | None = None) -> Pass:
        """The next pass of this epoch: a new one, or one that was under way, or over, when the run was stopped."""
        of, positioned = feed.length(loader, limit), isinstance(loader, Stateful)
        if self._passes_begun == len(self.passes):
            keeps = self.pipe.keeper is not None and not positioned
            self.passes.append(Pass(of=of, random=rng.capture(self.device) if keeps else None))
        begun = self.passes[self._passes_begun]
        if begun.of and of and begun.of != of:  # as many samples on another number of ranks
            begun.given = round(begun.given * of / begun.of)
        begun.loader, begun.of, begun.skip = loader, of, 0 if positioned else begun.given
        self._passes_begun += 1
        self.weight = 1  # the first batch, for which the loader starts, is always waited for by the clock
        return begun

    def feed(
        self, loader: Iterable[Any], limit: int | None = None, *, progress: Pass | None = None
    ) -> Iterator[Any]:
        """Batches of a loader, on the device."""
        ledger = self.pipe.ledger if progress is not None else None  # a validation is no step
        device, to_device = self.device, feed.to_device
        progress = progress or Pass()
        if progress.done or (progress.given and self.ended):
            return
        source = self._opened(loader, progress)
        for batch in source if limit is None else islice(source, max(0, limit - progress.given)):
            progress.given += 1
            if ledger:
                ledger.took(loader, batch)
            yield to_device(batch, device)
        progress.done = True

    def _opened(self, loader: Iterable[Any], progress: Pass) -> Iterator[Any]:
        """The batches that are left of a pass."""
        if not progress.skip:
            return iter(loader)
        dist.print_root(
            f"headway: {type(loader).__name__} has no state_dict(): "
            f"{progress.skip:,} batches are read again and left out"
        )
        with rng.replayed(progress.random, self.device):
            source = iter(loader)
            for _ in range(progress.skip):
                next(source, None)
        return source

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all epochs of the stage."""
        set_phase(self.name)
        yield
        set_phase("between stages")

    def check(self) -> None:  # noqa: B027
        """Looks for what cannot work, before the run starts."""

    def total_steps(self) -> int | None:
        """Steps of the whole stage, if that is known."""
        return self.max_steps

    def check_progress(self, steps: int) -> None:
        """Refuses an epoch without a step where it would go on so for ever."""
        if steps == 0 and self.max_epochs is None:
            raise UsageError(no_batch(self))

    def before_log_point(self) -> None:  # noqa: B027
        """Logs what was put off until now."""

    def examine(self, point: Point) -> None:  # noqa: B027
        """Looks at what came out of a log point; may stop the run."""

    def epoch_values(self) -> dict[str, Any]:
        """The finished epoch's metrics, the same on all ranks."""
        values: dict[str, Any] = dict(self.meter.finish_epoch())
        for name in sorted(self.epoch_metrics):
            metric = self.epoch_metrics[name]
            result = metric.compute()
            values[name] = result.tolist() if isinstance(result, Tensor) else float(result)
            metric.reset()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Where the stage is; of the metrics, what the unfinished epoch has brought."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "stopped": self.stopped,
            "in_epoch": self.in_epoch,
            "epoch_began": self.epoch_began,
            "passes": [each.state_dict() for each in self.passes] if self.in_epoch else [],
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.steps, self.stopped = state["epoch"], state["steps"], state["stopped"]
        self.in_epoch, self.epoch_began = state["in_epoch"], state["epoch_began"]
        self.passes = [Pass(**each) for each in state["passes"]]
        self.meter.load_state_dict(state["meter"])

    def recall(self, random: Sequence[Mapping[str, Any] | None]) -> None:
        """The random numbers at the beginning of each pass, as this rank had them."""
        for each, before in zip(self.passes, random, strict=True):
            each.random = before


def missing_dataset(stage: Stage, name: str) -> str:
    there = ", ".join(repr(known) for known in stage.datasets) or "none"
    return (
        f"stage {stage.name!r} wants the dataset {name!r}, but there is {there}: call "
        f"pipe.register_dataset({name!r}, loader) before run()"
    )


def no_batch(stage: Stage) -> str:
    return (
        f"stage {stage.name!r} got no batch in epoch {stage.epoch + 1}: register a dataset that is not empty and can "
        "be iterated over again"
    )
