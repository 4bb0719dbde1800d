"""`Stage`: a part of a run whose loop is the user's own, and the names that every stage has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, nn

from headway.errors import UsageError
from headway.record.media.content import (
    Figure,
    ImageLike,
    take_figure,
    take_histogram,
    take_image,
    take_text,
)
from headway.train import loop
from headway.train.batches import Pass, count_rows, exact_count, missing_dataset
from headway.train.callback import check_stays_method
from headway.train.diagnose.profiler import ProfilerSettings
from headway.train.loop_state import LoopState, StageStatus
from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.metrics.meter import Reduction, Scope
from headway.train.settings import LOG_EVERY
from headway.train.uneven import gather_lengths

if TYPE_CHECKING:
    from headway.train.metrics.history import History
    from headway.train.pipeline import Pipeline

Added = TypeVar("Added", bound=EpochMetric)


class Stage(ABC):
    """One part of a run, with a loop of your own.

    `self.batches(name)` yields the batches of a dataset on this rank's device; each iteration of the loop is one step.
    This includes timing, log points, progress and stop requests.

        class Gan(hw.Stage):
            def run_epoch(self):
                for real in self.batches("train"):
                    ...
                    self.log("loss_g", loss_g, weight=len(real))

        pipe.append_stage(Gan(), max_epochs=10)

    What you write: `run_epoch`; optionally `count_samples`, `predict` and the hooks `pre_stage`, `post_stage`,
    `pre_epoch` and `post_epoch`. What you use: `log`, `log_image`, `log_figure`, `log_histogram`, `log_text`,
    `enable_profiler`, `batches`, `step_optimizer`, `add_metric`, `add_column`, `stop_stage`, `models`,
    `datasets`, `device`, `config`, `history`, `pipe`, `name`, `epoch`, `steps_done`, `max_epochs` and `max_steps`.

    All other names are yours, for attributes and for methods. The loop keeps its own state in `_loop`, and nowhere
    else. Defining or assigning one of the names that you use is an error (they are `@final`, so mypy reports it, too).
    """

    _loop: LoopState

    def __init__(self, *, log_every: int = LOG_EVERY) -> None:
        vars(self)["_loop"] = LoopState(self, log_every=log_every)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[: cls.__mro__.index(_home(cls))]:
            for name in vars(base):
                _refuse_clash(cls, name, getattr(cls, name, None))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_loop" or getattr(type(self), name, None) is not None:
            _refuse_clash(type(self), name, value)
        super().__setattr__(name, value)

    # --- what you write

    @abstractmethod
    def run_epoch(self) -> None:
        """Runs one epoch of the stage."""

    def pre_stage(self) -> None:  # noqa: B027
        """Called before the first epoch."""

    def post_stage(self) -> None:  # noqa: B027
        """Called after the last epoch. What it changes is saved; if it is interrupted, a resumed run calls it again."""

    def pre_epoch(self) -> None:  # noqa: B027
        """Called before each epoch."""

    def post_epoch(self) -> None:  # noqa: B027
        """Called after each epoch, when its metrics are in `self.history`; metrics that it logs are added to them."""

    def count_samples(self, batch: Any) -> int:
        """Returns the number of samples of a batch; by default the length of its first tensor."""
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if type(first) is Tensor and first.ndim and type(batch) in (tuple, list, Tensor):
            return first.shape[0]
        if (count := count_rows(batch)) is not None:
            return count
        raise UsageError(
            f"stage {self.name!r} cannot count the samples of a batch of type {type(batch).__name__}: define "
            "count_samples(self, batch), such as return len(batch[0])"
        )

    def predict(self, batch: Any) -> Any:  # noqa: ARG002
        """Returns what `pipe.predict` writes for a batch: tensors with a row for each sample, or a list of entries."""
        raise UsageError(
            f"stage {self.name!r} has no predict: define predict(self, batch) that returns a row for each sample"
        )

    # --- what you use

    @cached_property
    @final
    def pipe(self) -> Pipeline:
        """The pipeline that this stage is part of, once it is appended."""
        raise UsageError(f"stage {self.name!r} is not part of a pipeline yet: call pipe.append_stage(stage)")

    @property
    @final
    def name(self) -> str:
        """The name that was passed to `append_stage`; by default the name of the class in lower case."""
        return self._loop.name

    @property
    @final
    def epoch(self) -> int:
        """Finished epochs of this stage, which is also the number of the current epoch, from 0."""
        return self._loop.epoch

    @property
    @final
    def steps_done(self) -> int:
        """Finished steps of this stage; `pipe.steps_done` counts through all stages."""
        return self._loop.steps_done

    @property
    @final
    def max_epochs(self) -> int | None:
        """The number of epochs after which this stage ends."""
        return self._loop.max_epochs

    @property
    @final
    def max_steps(self) -> int | None:
        """The number of steps after which this stage ends."""
        return self._loop.max_steps

    @property
    @final
    def models(self) -> Mapping[str, nn.Module]:
        """The registered models to call: wrapped in training, bare in validation."""
        return self._loop.models

    @property
    @final
    def datasets(self) -> Mapping[str, Iterable[Any]]:
        """The registered datasets."""
        return self.pipe.datasets

    @property
    @final
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.pipe.device

    @property
    @final
    def config(self) -> Any:
        """The config of the pipeline."""
        return self.pipe.config

    @property
    @final
    def history(self) -> History:
        """The metrics of the run so far."""
        return self.pipe.history

    @final
    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float = 1.0,
        reduce: Reduction = "mean",
        scope: Scope = "global",
        ledger: bool = False,
    ) -> None:
        """Adds a value to a metric: a mean over all batches and ranks, weighted by `weight`. Waits for nothing.

        Give the number of samples (or tokens) as `weight`, or a short last batch counts as much as a full one. `reduce`
        is "mean", "sum", "min", "max" or "last"; with each, a value of weight 0 does not count. `scope="rank"` keeps a
        metric on its rank, in the metrics file of that rank. In a `TrainValStage` the metric is called `train/name` in
        training and `val/name` in validation. In a loop of your own, `ledger=True` makes it the loss of the step in the
        ledger, which `headway verify-resume` compares.

            self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        """
        self._loop.log(name, value, weight, reduce, scope)
        if ledger:
            self._loop.log_loss(name, value, weight)

    @final
    def log_image(
        self, name: str, image: ImageLike, *, caption: str = "", columns: int | None = None
    ) -> None:
        """Keeps an image in the run directory and passes it to the sinks; a batch or a list of images becomes a grid.

        Takes tensors, numpy arrays and Pillow images: height x width, with 1, 3 or 4 channels before or after them;
        bytes, or floats from 0 to 1 (a batch with other values is scaled from its minimum and maximum). Another thread
        encodes it. Only rank 0 keeps media, unless `pipe.set_media(ranks=...)` is called. In a `TrainValStage` the name
        gets the prefix `train/` or `val/`, as in `log`. An image of the seventh step has the step 7, as its loss has;
        one that is logged between steps has the number of finished steps.

            self.log_image("samples", x[:16], caption="the first 16 of the batch")
        """
        self._loop.log_media(name, lambda: take_image(image, caption=caption, columns=columns))

    @final
    def log_figure(self, name: str, figure: Figure, *, caption: str = "") -> None:
        """Keeps a matplotlib figure as an image; it is drawn at once, and may be closed afterwards.

        self.log_figure("confusion", figure)
        """
        self._loop.log_media(name, lambda: take_figure(figure, caption=caption))

    @final
    def log_histogram(self, name: str, values: Any, *, bins: int = 64) -> None:
        """Keeps a histogram of a tensor, an array or a list of numbers; tensors on a GPU are counted there.

        self.log_histogram("weights/head", self.models["net"].head.weight)
        """
        self._loop.log_media(name, lambda: take_histogram(values, bins=bins))

    @final
    def log_text(self, name: str, text: str) -> None:
        """Keeps a text, such as the output of a language model.

        self.log_text("generated", tokenizer.decode(tokens))
        """
        self._loop.log_media(name, lambda: take_text(text))

    @final
    def enable_profiler(self, steps: str | int, *, ranks: Sequence[int] = (0,), memory: bool = False) -> None:
        """Traces a window of steps with `torch.profiler`, on the host, on the device and in the loaders.

        `steps` are those of this stage, from 1. The trace is written to `traces/` of the run directory, for Perfetto,
        and a summary is printed. `memory=True` adds each allocation, and on CUDA a snapshot of the allocator's history.
        HEADWAY_PROFILE=20-25 does the same without a change to the script, with the steps of the run.

        >>> stage.enable_profiler(steps="20-25", ranks=(0,), memory=True)
        """
        self._loop.profiler_settings = ProfilerSettings(steps=steps, ranks=ranks, memory=memory)

    @final
    def add_metric(self, name: str, metric: Added | None = None) -> Added:
        """Computes `metric` at the end of each epoch, on all ranks, and resets it. You update it.

        Use it for metrics that are not weighted means, such as AUROC; torchmetrics reduce them over ranks. A metric
        that is updated only in `post_epoch` is computed after it. In a `TrainValStage`, a metric whose name begins with
        `val/` is reset before each validation and computed after it. A MetricCollection has a value under `name/key`
        for each of its metrics. Returns the metric.

        >>> self.auroc = self.add_metric("val/auroc", BinaryAUROC().to(self.device))  # in pre_stage
        >>> self.auroc.update(scores, labels)  # in val_step
        """
        if not isinstance(name, str):
            raise UsageError(
                f"add_metric got a {type(name).__name__} instead of a name: give both, such as "
                'add_metric("val/f1", metric)'
            )
        if not isinstance(metric, EpochMetric):
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__}: add an object with compute() and reset(), such as one "
                "of torchmetrics, or log numbers with self.log()"
            )
        self._loop.add_metric(name, metric)
        return metric

    @final
    def add_column(self, name: str) -> None:
        """Shows a metric in the progress table, which always has `train/loss` and `val/loss`.

        >>> self.add_column("val/accuracy")
        """
        if name not in self._loop.columns:
            self._loop.columns.append(name)

    @final
    def stop_stage(self) -> None:
        """Ends this stage early, on all ranks at the same step: at the next log point, or at the end of the epoch.

        One rank that calls it is enough.

            if self.steps_done == 1000:
                self.stop_stage()
        """
        self._loop.stop_requested = True

    @final
    def batches(self, name: str = "train") -> Iterator[Any]:
        """Yields the batches of dataset `name` on this rank's device. Each iteration of your loop is one step.

        An iteration that ends with `break` is a step, too, and so is one over several datasets side by side, as in
        `zip(self.batches("a"), self.batches("b"))`. All ranks end with the rank that has the fewest batches.

            for x, y in self.batches("train"):
                ...
        """
        state, timer = self._loop, self._loop.run.timer
        loader = self.datasets.get(name)
        if loader is None:
            raise missing_dataset(self, name)
        finish_open_steps(state)
        lengths = gather_lengths(exact_count(loader), self.device)
        progress = state.begin_pass(loader, None, lengths)
        beside = progress.batches_given > 0 and not progress.done  # whether the step is that of another pass
        try:
            for batch in state.device_batches(loader, progress=progress):
                state.batch, state.in_step = batch, True
                state.samples += state.checked_count(batch)
                timer.mark_step("compute")
                state.open_passes.append(progress)
                yield batch
                beside = not _ends_step(state, progress)
                if beside:
                    timer.mark_step("data")
                    continue
                finish_open_steps(state)
                loop.finish_step(state)
                if not state.more_steps:
                    timer.mark("other")
                    return
            if beside:  # the other passes have given one more batch, for a step that does not happen
                state.open_passes.clear()
                state.in_step = False
            state.end_pass(progress)
        finally:
            progress.done = True
            if _ends_step(state, progress):
                # not counted here: an exception may be ending the run. One `break` closes passes side by side one
                # after another
                state.step_left_open = True

    @final
    def step_optimizer(self, name: str) -> None:
        """Steps an optimizer in a loop of your own, then its scheduler and the EMA of its model.

            self.pipe.optimizers["adamw"].zero_grad()
            loss.backward()
            self.step_optimizer("adamw")

        In `optimize` of a `TrainValStage`, it steps only the optimizer, as the loop would: the loop does the rest.
        """
        self._loop.step_optimizer(self.pipe.optimizers[name])


def _ends_step(state: LoopState, progress: Pass) -> bool:
    """Whether a step ends when the loop takes the next batch of a pass, or closes the pass.

    With passes side by side, a step ends at the first of them: then all have given the same number of batches, and a
    checkpoint has their positions before the next iteration. The others belong to the same step.
    """
    for place, each in enumerate(state.open_passes):
        if each is progress:
            del state.open_passes[place:]
            return True
    return False


def finish_open_steps(state: LoopState) -> None:
    """Counts a step of a user's loop that ended with `break`."""
    if state.step_left_open:
        state.step_left_open = False
        loop.finish_step(state)


@contextmanager
def logging_once(hook: str, subject: object) -> Iterator[None]:
    """Surrounds a hook. Its logs do not count if an earlier attempt has called it for this stage or epoch."""
    if not isinstance(subject, Stage):
        yield
        return
    state = subject._loop
    again = {"pre_stage": state.status is not StageStatus.NEW, "pre_epoch": bool(state.passes)}
    with state.not_counted() if again.get(hook) else nullcontext():
        yield


_AT_APPEND = ("max_epochs", "max_steps", "name")


def _home(kind: type) -> type:
    """Returns the first class of headway in the MRO of `kind`."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("headway.train."))


def _refuse_clash(kind: type, name: str, value: object) -> None:
    """Raises `UsageError` if a user's attribute would replace one that the user or the loop relies on."""
    own = getattr_static(_home(kind), name, None)
    function = own.fget if isinstance(own, property) else getattr(own, "func", own)
    if name in _AT_APPEND:
        raise UsageError(
            f"{kind.__name__} sets {name!r} itself: pass it to pipe.append_stage(stage, {name}=...)"
        )
    if name == "_loop" or getattr(function, "__final__", False):
        raise UsageError(f"{kind.__name__} sets {name!r}, which every stage has already: choose another name")
    check_stays_method(kind, _home(kind), name, value)
