"""`RunState`: the state that the loop keeps for a run, in `_state` of its pipeline, so that other names are free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from headway import data, dist, record
from headway.dist import seeding
from headway.errors import UsageError
from headway.record.media.writer import MediaSettings, MediaWriter
from headway.record.sinks import Sink, feeding
from headway.run import Run
from headway.run.choice import Choice
from headway.system import environment
from headway.system.log import logger
from headway.train.batches import set_epoch
from headway.train.callback import Callback, defines_hook
from headway.train.checks import check_monitored, warn_of_unread_sweep
from headway.train.diagnose.evidence import explain_out_of_memory
from headway.train.diagnose.plan_check import with_plan
from headway.train.diagnose.profiler import profiling
from headway.train.loop_state import LoopState, StageStatus
from headway.train.metrics.history import HistoryRow
from headway.train.metrics.meter import LogPoint
from headway.train.metrics.reporter import Reporter
from headway.train.metrics.stragglers import Stragglers, busy
from headway.train.metrics.timing import PhaseTimer
from headway.train.model.optimizer_step import epoch_schedules
from headway.train.model.schedules import Schedule
from headway.train.resume import rng
from headway.train.resume.end_of_run import wait_for_others
from headway.train.resume.ledger_writer import LedgerWriter
from headway.train.resume.state import StatefulObject
from headway.train.stage import Stage, logging_once

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.resume.checkpointer import Checkpointer


@final
class RunState:
    """The objects that record, measure and save a run, and the operations around stages, epochs and log points."""

    def __init__(self, pipe: Pipeline, root: str | Path, free: Collection[str]) -> None:
        self.pipe, self.root, self.free = pipe, root, free
        self.directory: Run | None = None
        self.choice: tuple[tuple[str, ...], Choice] | None = None
        """the run to train in, once it is chosen, after the settings that it was chosen for"""
        self.steps_done = 0
        """finished steps of all stages"""
        self.epoch = 0
        """finished epochs of all stages"""
        self.current_stage: Stage | None = None
        self.timer = PhaseTimer(pipe.device, alone=pipe.world.world_size == 1)
        self.callbacks: list[Callback] = []
        self.schedules: dict[str, Schedule] = {}
        self.registered_state: dict[str, StatefulObject] = {}
        """equal on all ranks"""
        self.rank_states: dict[str, StatefulObject] = {}
        """of each rank its own"""
        self.sinks: list[Sink] = []
        self.media_settings = MediaSettings()
        self.media: MediaWriter | None = None
        self.ledger_enabled = environment.is_on(environment.LEDGER)
        self.ledger: LedgerWriter | None = None
        self.checkpointer: Checkpointer | None = None
        self.outputs_are_reused = False
        """whether the next call of a model overwrites its last output, as with CUDA graphs"""
        self._hooks_called: dict[tuple[str, int, int], object] = {}
        """hook, subject and owner by their ids, with the objects themselves, since Python reuses ids"""
        self.busy_s = 0.0
        """the seconds that this rank spent on its own work between the last two log points"""
        self._interval_s = 0.0  # all seconds between these log points
        self._stragglers = Stragglers()
        self._reporter: Reporter | None = None

    @property
    def stage_states(self) -> list[LoopState]:
        """The states of all stages."""
        return [stage._loop for stage in self.pipe.stages]

    @property
    def current_state(self) -> LoopState | None:
        """The state of the stage that is running."""
        stage = self.current_stage
        return None if stage is None else stage._loop

    @property
    def is_running(self) -> bool:
        """Whether a run is open, from `pre_run` to `post_run`."""
        return self._reporter is not None

    @property
    def reporter(self) -> Reporter:
        if self._reporter is None:
            raise UsageError("the pipeline is not running: log between pre_run and post_run")
        return self._reporter

    @property
    def repeats_batches(self) -> bool:
        """Whether another rank computes on the same batches as this one and counts for both."""
        groups = [model.tensor_group for model in self.pipe.registered_models.values()]
        return any(group is not None and group.rank > 0 for group in groups)

    def separate_streams(self, loader: Iterable[Any]) -> None:
        """Gives this rank its own random numbers from here on; ranks with the same batches draw the same."""
        for model in self.pipe.registered_models.values():
            if model.tensor_group is not None and model.tensor_group.size > 1:
                seeding.separate_streams(model.tensor_group.first_rank, ranks_share=True)
                return
        if not isinstance(
            loader, data.DataLoader | data.ShardLoader
        ):  # these may have been given another rank
            seeding.separate_streams(self.pipe.world.rank)

    def has_post_stage(self, stage: Stage) -> bool:
        """Whether the user defines a `post_stage`, which may change the state after the last save."""
        own = type(stage).post_stage is not Stage.post_stage or "post_stage" in vars(stage)
        return own or any(defines_hook(each, "post_stage") for each in self.callbacks)

    def begin_averages(self) -> None:
        """Begins the averages of weights that no step has updated yet, with the weights as they are now."""
        for model in self.pipe.registered_models.values():
            if model.ema is not None:
                model.ema.begin()

    def run_hook(self, hook: str, subject: Pipeline | Stage) -> None:
        """Calls a hook of the subject, then of the callbacks, without the hang check: hooks have no time limit."""
        with self._calling(hook, subject):
            for owner in (subject, *self.callbacks):
                self._call_hook(hook, subject, owner)

    def run_hook_once(self, hook: str, subject: Pipeline | Stage, callbacks: Iterable[Callback]) -> None:
        """Calls a hook of the subject and the callbacks, except where a run or an evaluation has called it before."""
        with self._calling(hook, subject):
            for owner in (subject, *callbacks):
                if (hook, id(subject), id(owner)) not in self._hooks_called:
                    self._call_hook(hook, subject, owner)

    @contextmanager
    def _calling(self, hook: str, subject: Pipeline | Stage) -> Iterator[None]:
        """Surrounds the calls of a hook, in which all ranks draw the same numbers: it may initialize a model."""
        purpose = f"{hook} of {subject.name}, epoch {self.epoch}"
        with (
            dist.no_hang_check(),
            logging_once(hook, subject),
            rng.joined_streams(purpose, self.pipe.device),
        ):
            yield

    def _call_hook(self, hook: str, subject: Pipeline | Stage, owner: Pipeline | Stage | Callback) -> None:
        self._hooks_called[hook, id(subject), id(owner)] = subject, owner
        getattr(owner, hook)(*([] if owner is subject else [subject]))

    # --- around a run and a stage

    @contextmanager
    def recording(self, directory: Run) -> Iterator[None]:
        """Opens the rank logs, the metrics files, the ledger and the checkpoints of a run, and closes them."""
        world = self.pipe.world
        with ExitStack() as stack:
            stack.callback(self._end_recording)  # after a failure, too
            recording = stack.enter_context(record.recording(directory, world, config=self.pipe.config))
            self.directory = directory = recording.run
            warn_of_unread_sweep(self.pipe)
            stack.enter_context(feeding(directory, self.sinks, rank=world.rank, local_rank=world.local_rank))
            self._reporter = stack.enter_context(Reporter(directory, world, recording.events))
            if world.is_root:
                self.pipe.history.write_to(self._reporter.rows)
            if self.ledger_enabled:
                self.ledger = stack.enter_context(LedgerWriter(directory, world, attempt=recording.attempt))
            self.media = stack.enter_context(
                MediaWriter(directory, self.media_settings, world=world, attempt=recording.attempt)
            )
            if self.checkpointer:
                stack.enter_context(self.checkpointer.saving(recording))
            yield
            dist.set_phase("done")
            wait_for_others()
        self.join_streams()

    def join_streams(self) -> None:
        """Lets all ranks draw the same random numbers once a run has ended: the script may build another model."""
        seeding.join_streams(f"after step {self.steps_done} of {self.pipe.name}")

    def _end_recording(self) -> None:
        self.current_stage = self._reporter = self.media = None

    @contextmanager
    def running_stage(self, state: LoopState) -> Iterator[None]:
        """Surrounds all epochs of one stage: hooks, display, profiler, and the report if memory runs out."""
        self.current_stage = state.stage
        if self.checkpointer and state.status is StageStatus.NEW:
            self.checkpointer.resume()
        display = self.reporter.displaying(state)
        with state.running(), display, explain_out_of_memory(state), profiling(state):
            self._run_pre_stage(state)
            yield
            if self.checkpointer:
                self.checkpointer.resume()  # if only the hook was left to run
            self.run_hook("post_stage", state.stage)
            state.log_after_epoch()
            hooked, state.post_stage_due = state.post_stage_due, False
            if self.checkpointer:
                self.checkpointer.after_stage(state, hooked=hooked)
        self.current_stage = None

    def repeat_pre_stage(self, state: LoopState) -> None:
        """Calls `pre_stage` of a stage that an earlier attempt has ended: later ones may train what it has made."""
        self.current_stage = state.stage
        with state.running():
            self._run_pre_stage(state)
        self.current_stage = None

    def _run_pre_stage(self, state: LoopState) -> None:
        with self.checkpointer.shapes.in_pre_stage() if self.checkpointer else nullcontext():
            self.run_hook("pre_stage", state.stage)

    # --- epochs and log points

    def begin_epoch(self, state: LoopState) -> None:
        """Calls `set_epoch` of loaders, unless they have restored a position within the epoch, and `pre_epoch`."""
        in_epoch = state.status.in_epoch
        if self.checkpointer and not in_epoch:
            self.checkpointer.resume()
        for loader in self.pipe.datasets.values():
            set_epoch(loader, self.epoch, in_place=in_epoch and isinstance(loader, StatefulObject))
        state.begin_epoch()
        self.run_hook("pre_epoch", state.stage)
        if not state.steps_done:
            self.begin_averages()  # hooks may have set the weights
        if self.checkpointer:  # what the hook changed and drew in this attempt does not count
            self.checkpointer.resume()
        state.after_pre_epoch()
        dist.set_phase(state.name, self.steps_done)

    def end_epoch(self, state: LoopState, values: Mapping[str, Any]) -> None:
        """Counts an epoch and records its metrics."""
        row = self._row(state, values)
        self.pipe.history.add_epoch(row)
        self.reporter.end_epoch(state, row)
        state.end_epoch()
        self.epoch += 1
        if self.checkpointer:
            self.checkpointer.record_metrics(values)

    def extend_epoch(self, state: LoopState, point: LogPoint) -> None:
        """Adds the metrics that were logged after an epoch to those of the epoch."""
        row = self.pipe.history.last_epoch
        if row is None or row.stage != state.name:
            return  # the stage had no epoch
        for name in point.values:
            if name in row.values:
                raise UsageError(
                    f"metric {name!r} was logged after the epoch that has it already: choose another name"
                )
        self.pipe.history.add_epoch(replace(row, values=point.values))
        self.reporter.extend_epoch(row, point)
        if self.checkpointer:
            self.checkpointer.record_metrics(point.values)

    def apply_metrics(self, state: LoopState) -> None:
        """Applies the metrics of an epoch, including those of `post_epoch`, to early stopping and schedulers.

        Raises `UsageError` if a setting names a metric that has not appeared by now.
        """
        last = self.pipe.history.last_epoch
        assert last is not None, "an epoch has ended"
        state.stop_early(last.values)
        for schedule in epoch_schedules(state):
            schedule.end_epoch(last.values)
        check_monitored(state, last.values)

    def record_log_point(self, state: LoopState, kind: str, point: LogPoint) -> None:
        """Records the result of a log point or a validation."""
        if not point.values and not point.local:
            return
        seconds, point = self.timer.take(state.log_every), with_plan(state, kind, point)
        if kind == "train":
            self._check_stragglers(point, seconds)
        seconds["compute"] = seconds.get("compute", 0.0) + seconds.pop("backward", 0.0)
        self.pipe.history.add_log_point(self._row(state, point.values))
        self.reporter.log_point(state, kind, point, seconds, self.steps_done)
        if self.checkpointer and kind == "validation":
            self.checkpointer.record_metrics(point.values)
        if self.callbacks:
            with dist.no_hang_check():
                for callback in self.callbacks:
                    callback.log_point(state.stage, kind, point)

    def _row(self, state: LoopState, values: Mapping[str, Any]) -> HistoryRow:
        return HistoryRow(stage=state.name, epoch=state.epoch, step=self.steps_done, values=values)

    def flush_before_save(self) -> Callable[[], None]:
        """Returns a function that waits for the rows and media that the checkpoint of this step refers to."""
        media, rows = self.media and self.media.flush_before(self.steps_done), self.reporter.rows

        def flush() -> None:
            if media is not None:
                media()
            rows.sync()

        return flush

    def _check_stragglers(self, point: LogPoint, seconds: Mapping[str, float]) -> None:
        slow = self._stragglers.observe(point.busy, whole=self._interval_s, sampled=self.timer.every > 1)
        if slow is not None and self.pipe.world.is_root:
            logger.warning(slow, extra={"event": "straggler"})
        self.busy_s, self._interval_s = busy(seconds)
