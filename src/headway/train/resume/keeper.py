"""Keeping a pipeline's state while it trains: when it is saved, where all ranks stop, and how a run goes on.

A save is one consistent cut, made between two steps or after an epoch, never within an accumulation. What follows a
step at once (a validation, the end of the epoch) comes before a save that can wait, so that the best checkpoint is
known by its own metrics; a stop does not wait, and a validation that was due is made first thing afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.tensor import DTensor

from headway import checkpoint, data, dist, schedulers
from headway.checkpoint.policy import Policy
from headway.dist import set_phase
from headway.dist.collective.exchange import gather_rows
from headway.dist.collective.guard import from_root
from headway.dist.control import stop
from headway.dist.control.agreement import Agreement
from headway.dist.group import current
from headway.dist.seeding import derive_seed
from headway.errors import HeadwayError, RunLocked, Stopped, StorageError, UsageError
from headway.record import Recording
from headway.run.choice import NEW, Choice
from headway.system.failpoints import failpoint
from headway.train import loop
from headway.train.loop_state import SAVE
from headway.train.metrics.meter import LogPoint, Value
from headway.train.resume import attempts, rng, state
from headway.train.resume.state import StatefulObject

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage
    from headway.train.train_val import TrainValStage

MAX_FAILURES = 3
"""saves in a row that may fail before the run stops: a disk that was full for a while costs no run"""


@final
class Keeper:
    """Saves a pipeline's state, and puts it back. Made by `pipe.enable_checkpointing`."""

    def __init__(self, pipe: Pipeline, policy: Policy) -> None:
        self.pipe, self.policy = pipe, policy
        self.due = False
        """a save is to be made as soon as may be"""
        self._saver: checkpoint.Saver | None = None
        self._agreement = Agreement()
        self._attempt = 0
        self._saved_at: int | None = None
        self._since = time.monotonic()
        self._failures = 0
        self._best: float | None = None
        self._values: tuple[int, Mapping[str, Value]] = (-1, {})
        self._random: Callable[[], None] | None = None  # to be put back where training goes on
        self._before_validation: dict[str, Any] | None = None
        self._pace = _Pace()

    # --- around a run

    @contextmanager
    def opened(self, recording: Recording) -> Iterator[None]:
        """Around all stages: stop signals are heard, and saves may be made."""
        run, root = self.pipe.directory, self.pipe.world.is_root
        self._attempt = recording.attempt
        self._agreement = current().agreement
        self._agreement.begin()
        dist.barrier()  # nobody asks for a stop before all have begun to count
        end = schedulers.end_time() if root else None
        saver = checkpoint.Saver(run, lock=recording.lock, background=self.policy.background)
        with stop.handle_stop_signals(end, self._pace.lead), saver as self._saver:
            try:
                yield
            finally:
                if root:
                    with suppress(StorageError):  # a fact for people; how the attempt ended is told elsewhere
                        run.note_attempt(self._attempt, step_ended=self.pipe.steps_done)

    def start(self, choice: Choice) -> None:
        """Goes on from the newest whole checkpoint of the run, or makes the first one."""
        try:
            loaded = checkpoint.load_latest(choice.run, partial(state.destinations, self.pipe))
        except UsageError as error:  # the script was changed since
            raise UsageError(f'{error} (a new run: resume="never")') from error
        from_root(partial(self._begin, loaded.step if loaded else 0))
        if loaded is None:
            if choice.why != NEW:
                dist.print_root(
                    f"headway: {choice.run.id} has no checkpoint yet: it begins here ({choice.why})"
                )
            self._save(None, must=True)
            self.saver.wait()  # storage that does not work is known before the first step
            self.collect_finished()
            return
        if self.policy.resume == "never":
            raise UsageError(
                f'resume="never", but {choice.run.path} has checkpoints: take "auto" to go on from step '
                f"{loaded.step:,}, or a new run directory"
            )
        dist.print_root(f"headway: going on with {choice.run.id} from step {loaded.step:,} ({choice.why})")
        self._restore(loaded)
        self.pipe._run_hook("resume_run", self.pipe)

    def finish(self) -> None:
        """The last checkpoint: the run is over."""
        self._save(None, must=True)
        self.saver.wait()
        self.collect_finished()

    def _begin(self, step: int) -> None:
        run = self.pipe.directory
        if self.policy.resume == "auto":
            attempts.check_progress(run, self._attempt, step)
        run.note_attempt(self._attempt, step_started=step)

    # --- what the loop calls

    def after_step(self, stage: Stage) -> None:
        """Between two steps."""
        self._pace.step()
        why = self._agreement.pass_point()
        if why is not None:
            self._stop(stage, why)
        every = self.policy.interval.steps
        self.due |= every is not None and self.pipe.steps_done % every == 0
        if self.due and not stage._loop.pause_follows():
            self._save(stage)

    def before_validation(self) -> None:
        """Notes what a validation may change: random numbers and positions of loaders."""
        self._before_validation = self._local_facts()
        self._pace.pause()

    @property
    def leaves_validation(self) -> bool:
        """Whether the end of this validation is where all ranks stop."""
        return self._agreement.stops_next

    def in_validation(self, stage: Stage) -> None:
        """When this rank is through with its batches: the validation may be left out here, and made after a restart."""
        why = self._agreement.pass_point()
        if why is not None:
            self._stop(stage, why)
        self._before_validation = None

    def after_validation(self, stage: TrainValStage) -> None:
        """After a validation between two steps; at the end of an epoch the save comes a little later."""
        if not stage._loop.settings.validates_between_steps:
            return
        self._look_for_best()
        if self.due and not stage._loop.pause_follows():
            self._save(stage)

    def after_epoch(self, stage: Stage) -> None:
        """Between two epochs."""
        self._look_for_best()
        if self.pipe.epoch == 1 and self._best is None and (wanted := self.policy.retention.keep_best):
            there = ", ".join(self.pipe.history.names()) or "none"
            dist.print_root(f"headway: keep_best={wanted!r}: there is no such metric so far, but {there}")
        every = self.policy.interval.epochs
        self.due |= every is not None and self.pipe.epoch % every == 0
        why = self._agreement.pass_point()
        if why is not None:
            self._stop(stage, why)
        if self.due:
            self._save(stage)
        self._pace.pause()

    def log_point_flags(self) -> int:
        """For the word of flags at a log point, where rank 0's is heard: it has the clock."""
        every = self.policy.interval.seconds
        late = every is not None and not self.due and time.monotonic() - self._since >= every
        return SAVE if late else 0

    def after_log_point(self, point: LogPoint) -> None:
        """Rank 0's wish to save has been heard by all; what was saved meanwhile is told."""
        self.due |= bool(point.flags[0] & SAVE)
        self.collect_finished()

    def record_metrics(self, values: Mapping[str, Value]) -> None:
        """The metrics of an epoch or a validation."""
        known = self._values[1] if self._values[0] == self.pipe.steps_done else {}
        self._values = (self.pipe.steps_done, {**known, **values})

    def restore_rng(self) -> None:
        """Where training goes on after a restart: random numbers are as they were."""
        if self._random is not None:
            self._random()
            self._random = None

    def collect_finished(self) -> None:
        """Rows for the saves that have become whole, and room for the next ones."""
        for saved in self.saver.finished():
            self._failures = 0
            self._pace.save = saved.total_s
            if self.pipe.world.is_root:
                self.pipe._reporter.checkpoint(saved)
                checkpoint.prune(self.pipe.directory, self.policy.retention)

    # --- saving

    @property
    def saver(self) -> checkpoint.Saver:
        assert self._saver is not None, "the run is not open"
        return self._saver

    def _stop(self, stage: Stage, why: str) -> None:
        self._save(stage, must=True)
        self.saver.wait()
        self.collect_finished()
        raise Stopped(
            f"stopped by {why} after step {self.pipe.steps_done:,}, with a checkpoint: the same command goes on"
        )

    def _save(self, stage: Stage | None, *, must: bool = False) -> None:
        """Saves the state as it is now. If `must`, a failure is final; else only a row of them."""
        pipe = self.pipe
        if stage is not None and stage._loop.logged_at != stage.steps_done:
            loop.log_point(stage)  # looks at the losses: what is spoilt is not saved
        self.due, self._since = False, time.monotonic()
        if self._saved_at == pipe.steps_done:
            return
        pipe._timer.mark("checkpoint")
        set_phase("checkpoint", pipe.steps_done)
        failpoint("train.save")
        self._check_weights()
        try:
            self._write()
        except RunLocked:
            raise
        except StorageError as error:
            self._failures += 1
            if must:
                self._write()  # what failed may have been the save before
            elif self._failures >= MAX_FAILURES:
                raise
            else:
                dist.print_root(
                    f"headway: a save failed at step {pipe.steps_done:,}, training goes on: {error}"
                )
        if not must:  # else the caller waits until it is whole, which takes as long as storage takes
            set_phase(stage.name if stage else "run", pipe.steps_done)
        pipe._timer.mark("other")
        self._pace.pause()

    def _write(self) -> None:
        pipe = self.pipe
        facts = self._before_validation or self._local_facts()
        shared = {"best": self._best, "seed": torch.initial_seed(), "datasets": facts["shared"]}
        at, values = self._values
        scalars = {name: value for name, value in values.items() if isinstance(value, float | int)}
        self.saver.wait()
        self.collect_finished()  # while nothing is in flight
        self.saver.save(
            state.contribution(pipe, state.gather(pipe) | {"run": shared}),
            step=pipe.steps_done,
            local=facts["local"],
            metrics=scalars if at == pipe.steps_done else {},
        )
        self._saved_at = pipe.steps_done
        self.collect_finished()

    def _local_facts(self) -> dict[str, Any]:
        """Random numbers and positions. Those of headway's loaders are the same on all ranks, and mean all of them."""
        pipe, stage = self.pipe, self.pipe.current_stage
        under_way = [each.loader for each in stage._loop.passes if not each.done] if stage else []
        positions = {
            name: _position(loader, under_way=any(loader is each for each in under_way))
            for name, loader in pipe.datasets.items()
            if isinstance(loader, StatefulObject)
        }
        shared = {name: state for name, state in positions.items() if _is_global(pipe.datasets[name])}
        local = {
            "random": rng.capture(pipe.device),
            "datasets": {name: state for name, state in positions.items() if name not in shared},
            "passes": [each.random for each in stage._loop.passes] if stage else [],
        }
        return {"shared": shared, "local": local}

    def _look_for_best(self) -> None:
        at, values = self._values
        scalars = {name: value for name, value in values.items() if isinstance(value, float | int)}
        better = self.policy.better(scalars, self._best) if at == self.pipe.steps_done else None
        if better is not None:
            self._best, self.due = better, True

    def _check_weights(self) -> None:
        """A checkpoint of weights that are not finite is no use to anybody, and would push out a good one."""
        weights = [
            local
            for model in self.pipe.registered_models.values()
            for p in model.bare.parameters()
            if p.requires_grad and (local := p.to_local() if isinstance(p, DTensor) else p).numel()
        ]
        largest = torch._foreach_norm(weights, float("inf")) if weights else ()
        bad = [norm.to(self.pipe.device, torch.float32).isfinite().logical_not() for norm in largest]
        if gather_rows(torch.stack(bad).any(0, keepdim=True).float() if bad else torch.zeros(1)).any():
            raise HeadwayError(
                f"weights are not finite after step {self.pipe.steps_done:,}, so they are not saved: lower the "
                "learning rate, set gradient_clip, or look at the data; the run can resume from the checkpoint before"
            )

    # --- restoring

    def _restore(self, loaded: checkpoint.LoadedCheckpoint) -> None:
        pipe, shared, local = self.pipe, loaded.state["run"], loaded.local
        state.restore(pipe, loaded.state)
        self._saved_at, self._best = loaded.step, shared["best"]
        same = loaded.world_size == pipe.world.world_size
        positions = shared["datasets"] | (local["datasets"] if same else {})
        for name, loader in pipe.datasets.items():
            if name in positions and isinstance(loader, StatefulObject):
                loader.load_state_dict(positions[name])
        if same:
            self._random = partial(rng.restore, local["random"], pipe.device)
            for stage in pipe.stages:
                if stage._loop.status.in_epoch:
                    stage._loop.restore_pass_rng(local["passes"])
        else:
            seed = derive_seed(shared["seed"] % 2**64, f"resume at step {loaded.step}")
            self._random = partial(dist.seed, seed, scope="rank")
            self._tell_other_ranks(loaded.world_size)

    def _tell_other_ranks(self, before: int) -> None:
        """What is not as it was, on another number of ranks."""
        now = self.pipe.world.world_size
        dist.print_root(
            f"headway: saved by {before} ranks, now {now}: the samples are the same, "
            "random numbers of ranks are derived anew from the seed and the step"
        )
        for name, loader in self.pipe.datasets.items():
            if size := _batch_of_each_rank(loader):
                dist.print_root(
                    f"headway: {name}: batch_size={size} is for each rank, so a step has {size * now} samples now, "
                    f"where it had {size * before}: give global_batch_size to keep it"
                )
            elif isinstance(loader, StatefulObject) and not _is_global(loader):
                dist.print_root(f"headway: {name}: deals its samples itself, and begins its epoch anew")


def _is_global(loader: object) -> bool:
    """Whether its position is one for all ranks, and means all of them."""
    return isinstance(loader, data.DataLoader | data.ShardLoader) and not loader.per_rank


def _batch_of_each_rank(loader: object) -> int | None:
    """The batch size of a training loader whose batches are as large as the number of ranks makes them."""
    if not isinstance(loader, data.DataLoader | data.ShardLoader) or loader.per_rank:
        return None
    return loader.batch_size if loader.state_dict()["shuffle"] else None


def _position(loader: StatefulObject, *, under_way: bool) -> dict[str, Any]:
    """Where a loader is. One without shuffle starts from the top when its next pass begins, wherever it stands now."""
    position = loader.state_dict()
    if under_way or not isinstance(loader, data.DataLoader | data.ShardLoader) or position.get("shuffle"):
        return position
    if isinstance(loader, data.DataLoader):
        return position | ({"next": 0, "places": {}} if loader.per_rank else {"samples": 0})
    return position | {"position": loader.samples * position["epoch"]}


@final
class _Pace:
    """How long before the end of a job a stop must be asked for: 1.5 saves and 2 steps, of the slowest."""

    def __init__(self) -> None:
        self.save = 0.0
        self._slowest = 0.0
        self._steps = 0
        self._last: float | None = None

    def lead(self) -> float:
        return 1.5 * self.save + 2 * self._slowest + stop.MARGIN_S

    def step(self) -> None:
        now = time.monotonic()
        self._steps += 1
        if self._last is not None and self._steps > 3:  # the first ones compile and warm up
            self._slowest = max(self._slowest, now - self._last)
        self._last = now

    def pause(self) -> None:
        """What comes now is no step."""
        self._last = None
