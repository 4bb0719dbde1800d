"""`Checkpointer`: when a pipeline saves its state, where all ranks stop, and how a run resumes.

A save is consistent over all ranks: between two steps or after an epoch, never within an accumulation. If a validation
or the end of the epoch follows a step, an ordinary save comes after it, so that the checkpoint has the metrics of its
own step and `keep_best` can choose by them. A stop does not wait; the resumed run begins with the validation that was
due.

A run may progress without a step: to the end of an epoch, or of `post_stage`. A checkpoint from there replaces an
earlier one of the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from headway import checkpoint, dist, schedulers
from headway.checkpoint.api import load_parts
from headway.checkpoint.settings import CheckpointSettings
from headway.dist import set_phase
from headway.dist.collective.exchange import RankExchange
from headway.dist.collective.guard import from_root
from headway.dist.control import stop
from headway.dist.control.agreement import Agreement
from headway.dist.group import current
from headway.dist.shared_run import note_script
from headway.errors import NoValidCheckpoint, RunLocked, Stopped, StorageError, UsageError
from headway.record import Recording
from headway.run.choice import NEW, Choice
from headway.run.job_record import exit_seconds
from headway.run.paths import RunPaths
from headway.system import environment, files
from headway.system.failpoints import failpoint
from headway.system.log import logger
from headway.system.text import format_duration
from headway.train.loop_state import SAVE, LoopState, StageStatus
from headway.train.metrics.meter import LogPoint, Value
from headway.train.resume import attempts, end_of_run, modules, rank_states, state
from headway.train.resume.lead_time import LeadTime
from headway.train.resume.positions import RankState
from headway.train.resume.registered import RegisteredSettings, SettingsByOwner
from headway.train.resume.rehearsal import Rehearsal
from headway.train.resume.rng import temporary_state
from headway.train.resume.save_attempt import NOWHERE, Place, SaveAttempt, StepMetrics
from headway.train.resume.unsaved import UnsavedState

if TYPE_CHECKING:
    from headway.train.run_state import RunState
    from headway.train.train_val_state import TrainValState

MAX_FAILURES = 3
"""scheduled saves in a row that may fail, each with its retry; a disk that is full for a while does not stop a run"""
_RETRY_PAUSES_S = (0.0, 1.0)
"""waits before the retries of a save without which the run would end"""


@final
class Checkpointer:
    """Saves and restores the state of a pipeline. `pipe.enable_checkpointing` creates it."""

    def __init__(
        self, run: RunState, settings: CheckpointSettings, log_point: Callable[[LoopState], None]
    ) -> None:
        self.run, self.pipe, self.settings = run, run.pipe, settings
        self._hold_log_point = log_point  # of the loop, which is above this package
        self.due = False
        """whether to save at the next opportunity"""
        self._saver: checkpoint.Saver | None = None
        self._agreement, self._retry_agreement = Agreement(), Agreement()
        self._attempt, self._stop_requests = 0, list[str]()  # the requests that have reached this rank
        self._last_save = SaveAttempt(place=NOWHERE, scheduled=False)
        self._retry = False  # whether to repeat a save that has failed
        self._newest: tuple[int, float] | None = None
        """step of the newest whole checkpoint, and when it was written"""
        self._save_began, self._failures = time.monotonic(), 0
        self._metrics, self._validated_at = StepMetrics(settings), -1  # see `Place.validated_at`
        self._saves_root_state = False
        """whether ranks have different weights, so that rank 0 saves its own for all"""
        self._registered: SettingsByOwner = {}
        self._fingerprints: Mapping[str, Mapping[str, str]] = {}
        self._unrestored: Callable[[], None] | None = None
        self._rehearsal, self._stepped = Rehearsal(run), False
        self._before_validation: dict[str, Any] | None = None
        self._lead_time = LeadTime()
        self.rank_state, self._unsaved = RankState(run), UnsavedState(run)
        self.shapes = modules.ModelShapes(run.pipe)

    # --- around a run

    @contextmanager
    def saving(self, recording: Recording) -> Iterator[None]:
        """Handles stop signals and allows saves within the context, which surrounds all stages."""
        run, root = self.pipe.directory, self.pipe.world.is_root
        self._attempt = recording.attempt
        self._agreement, self._retry_agreement = current().agreement, current().agreements["save"]
        self._agreement.begin()
        self._retry_agreement.begin()
        dist.barrier()  # no rank requests a stop before all ranks count their steps
        end = schedulers.end_time() if root else None
        self._lead_time.exit_s = exit_seconds(run) if root else 0.0
        saver = checkpoint.Saver(
            run,
            lock=recording.lock,
            background=self.settings.background,
            on_failure=self._request_retry if root else lambda _: None,
        )
        signals = stop.handle_stop_signals(current().request_stop, end, self._lead_time.seconds)
        with signals as self._stop_requests, saver as self._saver:
            try:
                yield
            finally:
                if root:
                    # only shown to people; the status is recorded elsewhere. UsageError: run.json cannot be read
                    with suppress(StorageError, UsageError):
                        run.note_attempt(self._attempt, step_ended=self.run.steps_done)

    def start(self, choice: Choice) -> None:
        """Finds the newest complete checkpoint of the run, or saves the first one. `resume` restores it."""
        registered = RegisteredSettings(self.run)
        self._registered = registered.settings
        loaded = self._find(choice)
        self._unsaved.begin()
        self.shapes.begin()
        self._fingerprints = from_root(partial(state.compare_datasets, self.pipe, loaded and loaded.state))
        if loaded is None and choice.why != NEW:
            from_root(partial(attempts.check_not_lost, self.pipe.directory, self._attempt))
        from_root(partial(self._record_start, loaded.step if loaded else 0))
        if loaded is None:
            if choice.why != NEW:
                self._log(f"{choice.run.id} has no checkpoint yet: starting from step 0 ({choice.why})")
            self.run.begin_averages()
            self._rehearsal.begin()
            self._save_and_wait(None)  # broken storage is detected before the first step
            return
        if self.settings.resume == "never":
            raise UsageError(
                f'resume="never", but {choice.run.path} has a checkpoint of step {loaded.step:,}: pass resume="auto" '
                "to resume from it, or choose a new run directory"
            )
        self._log(f"resuming {choice.run.id} from step {loaded.step:,} ({choice.why})")
        self._restore_position(loaded)
        self._close_stages()
        self._unrestored = partial(self._restore_in_run, loaded, choice, registered)

    def resume(self) -> None:
        """Restores the checkpoint that `start` has found, if it has not been restored yet.

        Called where training resumes: after the hooks that had ended before the save, which have been called again, and
        before those that had not begun. Of stages that had ended, only `pre_stage` is called. With a checkpoint from
        before the first epoch of a stage, that is before its `pre_stage`; from between two epochs, before `pre_epoch`;
        from within an epoch, after it.
        """
        restore, self._unrestored = self._unrestored, None
        if restore is not None:
            restore()

    def _restore_in_run(
        self, found: checkpoint.LoadedCheckpoint, choice: Choice, registered: RegisteredSettings
    ) -> None:
        self._restore(found)
        apply = environment.is_on(environment.APPLY)
        registered.resume(found.state["run"]["settings"], apply=apply)
        self.due = apply  # until a save follows, the checkpoint has the settings from before
        if choice.parent is not None and found.path == choice.parent:
            # the checkpoint is in the parent run, and so is the best one
            self._last_save = SaveAttempt(place=NOWHERE, scheduled=False)
            self._metrics.forget_best()
            self.pipe.history.copy_from_parent(self.pipe.directory.metrics_file(0))
            # A save follows the first step: until then, this run needs the parent's checkpoint, which may be pruned.
            self.due = True
        self.run.run_hook("resume_run", self.pipe)
        self.rank_state.restore_rng()  # what the hook draws does not count

    def _close_stages(self) -> None:
        """Ends stages that a later one has followed: the script may have raised their limits since."""
        stages = self.run.stage_states
        for number, stage in enumerate(stages):
            followed = any(later.status is not StageStatus.NEW for later in stages[number + 1 :])
            if followed and not stage.ended:
                stage.status = StageStatus.STOPPED
                self._log(
                    f"stage {stage.name!r} has ended, and is not trained further: a later one has begun"
                )
        if environment.is_on(environment.APPLY) and all(stage.ended for stage in stages):
            self._log(
                "all stages have ended: to train further, raise max_epochs or max_steps of the last one"
            )

    def restore_finished(self, choice: Choice) -> None:
        """Restores the end of a finished run, so that its script, started again, continues with trained models."""
        loaded = self._find(choice)
        if loaded is None:
            raise NoValidCheckpoint(
                f"{choice.run.id} is already finished ({choice.why}), but has no checkpoint to restore its models "
                'from: to train again, pass resume="never" or choose a new run directory'
            )
        self._restore_position(loaded)
        for stage in self.run.stage_states:
            self.run.repeat_pre_stage(stage)
        self._restore(loaded)
        self.rank_state.restore_rng()
        self.run.join_streams()
        self._log(
            f"{choice.run.id} is already finished ({choice.why}): models, history and counters of step "
            f"{loaded.step:,} are restored, and nothing is trained"
        )
        if self.pipe.world.is_root:
            note_script(choice.run)

    def _find(self, choice: Choice) -> checkpoint.LoadedCheckpoint | None:
        """Verifies the newest checkpoint, and loads the parts that hooks and checks need."""
        parts = dict.fromkeys((*state.POSITION, "run"))
        loaded = checkpoint.load_latest(choice.run, parts)
        if loaded is None and choice.parent is not None:
            return checkpoint.load(choice.parent, parts)
        return loaded

    def finish(self) -> None:
        """Saves the last checkpoint of a run, and stops if requested: the rest of the script may take a while."""
        self.resume()  # if all stages had ended before this attempt
        self._save_and_wait(None)
        after = f"after the last step, {self.run.steps_done:,}, with a checkpoint"
        advice = end_of_run.resume_advice(self.pipe.directory)
        end_of_run.stop_if_requested(self._stop_requests, f"{after}: {advice}")
        if self.pipe.world.is_root:
            note_script(self.pipe.directory, self._attempt)

    def leave(self) -> None:
        """Stops before the rest of the script, if a stop was requested while the run ended."""
        then = "the same command restores it and runs the rest of the script"
        end_of_run.stop_if_requested(
            self._stop_requests, f"when {self.pipe.directory.id} was finished: {then}"
        )

    def _record_start(self, step: int) -> None:
        """Records the step where this attempt starts; raises `NoProgress` if earlier attempts made none."""
        run = self.pipe.directory
        if self.settings.resume == "auto":
            attempts.check_progress(run, self._attempt, step)
        run.note_attempt(self._attempt, step_started=step)

    # --- what the loop calls

    def after_step(self, loop_state: LoopState) -> None:
        """Stops or saves between two steps, if due."""
        self._lead_time.step()
        if not self._stepped:
            self._stepped = True
            loop_state.settle()
            self._rehearsal.after_step()
            self._unsaved.after_step()
        self._pass_point(loop_state)
        every = self.settings.interval.steps
        self.due |= every is not None and self.run.steps_done % every == 0
        if (self.due or self._retry) and not loop_state.pause_follows():
            self._save(loop_state)

    @contextmanager
    def validating(self, loop_state: LoopState) -> Iterator[None]:
        """Surrounds the batches of a validation, and stops after them, if due.

        The checkpoint then has random number generators, positions of loaders and media from before the validation,
        since the resumed run repeats it.
        """
        self._before_validation = self.rank_state.capture()
        if since := self._before_validation["local"]["since_log_point"]:
            since["logged"] = []  # the resumed run holds this log point again
        if self.run.media:
            self.run.media.save_point(self.run.steps_done)
        self._lead_time.pause()
        try:
            yield
            self._pass_point(loop_state)
        finally:
            self._before_validation = None

    @property
    def stops_in_validation(self) -> bool:
        """Whether all ranks stop at the end of this validation."""
        return self._agreement.acts_next

    def after_validation(self, loop_state: TrainValState) -> None:
        """Saves after a validation between two steps, if due; at the end of an epoch `after_epoch` saves."""
        if not loop_state.settings.validates_between_steps or not loop_state.steps_done:
            return
        self._validated_at = self.run.steps_done
        self.due |= self._metrics.improve(self.run.steps_done)
        if (self.due or self._retry) and not loop_state.pause_follows():
            self._save(loop_state)

    def after_epoch(self, loop_state: LoopState) -> None:
        """Stops or saves between two epochs, if due."""
        every = self.settings.interval.epochs
        self.due |= every is not None and self.run.epoch % every == 0
        self.due |= self._metrics.improve(self.run.steps_done)
        self._pass_point(loop_state)
        if self.due or self._retry:
            self._save(loop_state)
        self._lead_time.pause()

    def after_stage(self, loop_state: LoopState, *, hooked: bool) -> None:
        """Saves the changes of `post_stage`, if any rank has one and the checkpoint of this step is without them."""
        saved = self._last_save.step == self.run.steps_done
        problem, unequal = state.find_unsavable(self.pipe) if hooked else (None, False)
        self._saves_root_state |= unequal
        if saved and problem is not None:
            lost = f"changes of post_stage are not in the checkpoint of step {self.run.steps_done:,}"
            self._log(f"{lost}: {problem}", logging.WARNING)
            self._last_save.place = self._place()  # the checkpoint from before the hook is the last
        elif unequal:
            self._log(f"checkpoints have the state of rank 0 after post_stage: {problem}", logging.WARNING)
        if saved:
            self._save(loop_state)

    def log_point_flags(self) -> int:
        """Returns the flag that requests a save by time; at a log point all ranks follow rank 0's clock."""
        every = self.settings.interval.seconds
        late = every is not None and not self.due and time.monotonic() - self._save_began >= every
        return SAVE if late else 0

    def after_log_point(self, point: LogPoint) -> None:
        """Applies rank 0's request to save, and reports the saves that have finished."""
        self.due |= bool(point.flags[0] & SAVE)
        self.collect_finished()

    def record_metrics(self, values: Mapping[str, Value]) -> None:
        """Adds the metrics of an epoch or a validation to those of the next checkpoint."""
        self._metrics.add(self.run.steps_done, values)

    def collect_finished(self) -> None:
        """Reports the saves that have finished, and prunes old checkpoints."""
        for saved in self.saver.finished():
            self._failures, self._newest = 0, (saved.step, time.monotonic())
            self._lead_time.save_s = max(self._lead_time.save_s, saved.total_s)
            if self.pipe.world.is_root:
                self.run.reporter.record_checkpoint(saved)
                self._prune()

    def _prune(self) -> None:
        try:
            checkpoint.prune(self.pipe.directory, self.settings.retention)
        except RunLocked:
            raise
        except StorageError as error:  # the next save prunes again
            self._log(f"old checkpoints were not removed: {error}", logging.WARNING)

    # --- saving

    @property
    def saver(self) -> checkpoint.Saver:
        assert self._saver is not None, "the run is not open"
        return self._saver

    def _pass_point(self, loop_state: LoopState) -> None:
        """Stops if all ranks have agreed to stop here; saves soon if they have agreed that the last save failed."""
        failed = self._retry_agreement.pass_point()
        if failed is not None and self._last_save.step == int(failed):  # else another save has followed
            self._retry = True
            self._mark_failed()
        why = self._agreement.pass_point()
        if why is not None:
            self._stop(loop_state, why)

    def _request_retry(self, step: int) -> None:
        """Asks all ranks to repeat the save in the background that has failed. Called by rank 0's saver."""
        if self._last_save.step == step and self._last_save.scheduled:
            current().request_save(str(step))

    def _stop(self, loop_state: LoopState, why: str) -> None:
        stopped = f"stopped by {why} after step {self.run.steps_done:,}"
        try:
            self._save_and_wait(loop_state)
        except RunLocked:
            raise
        except StorageError as error:
            raise StorageError(f"{stopped}, without a checkpoint of that step: {error}") from error
        raise Stopped(f"{stopped}, with a checkpoint: {end_of_run.resume_advice(self.pipe.directory)}")

    def _save_and_wait(self, loop_state: LoopState | None) -> None:
        """Saves and waits until the checkpoint is complete; raises if that fails three times."""
        self._begin_save(loop_state)
        self._wait_for_pending(final=False)  # even if that one failed, this one is tried
        for pause_s in (*_RETRY_PAUSES_S, None):
            if self._is_saved():
                break
            try:
                self._write(scheduled=False)
                self.saver.wait()
            except StorageError as error:
                self._note_failure(error, then="it is repeated", final=pause_s is None)
                time.sleep(pause_s or 0.0)
        self.collect_finished()

    def _save(self, loop_state: LoopState) -> None:
        """Saves the current state. A save that fails is repeated at the next step, and raises after `MAX_FAILURES`."""
        scheduled = self.due
        self._begin_save(loop_state)
        if not self._is_saved():
            self._wait_for_pending()
            try:
                self._write(scheduled=scheduled)
            except StorageError as error:
                self._note_failure(error)
                self._retry = scheduled
        set_phase(loop_state.name, self.run.steps_done)
        self.run.timer.mark("other")
        self._lead_time.pause()

    def _begin_save(self, loop_state: LoopState | None) -> None:
        if loop_state is not None and loop_state.logged_at != loop_state.steps_done:
            self._hold_log_point(loop_state)  # raises if a loss is non-finite, before it is saved
        self.due, self._retry, self._save_began = False, False, time.monotonic()
        self.run.timer.mark("checkpoint")
        set_phase("checkpoint", self.run.steps_done)

    def _is_saved(self) -> bool:
        """Whether a save of this state was begun, and has not failed as far as all ranks know."""
        return self._last_save.place == self._place() and not self._last_save.failed

    def _place(self) -> Place:
        """Returns the current place of the run."""
        ended = sum(each.ended for each in self.run.stage_states)
        return Place(
            step=self.run.steps_done,
            epoch=self.run.epoch,
            stages_ended=ended,
            validated_at=self._validated_at,
        )

    def _wait_for_pending(self, *, final: bool | None = None) -> None:
        """Waits for the save in the background, and reports it if it has failed, as `_note_failure` does."""
        try:
            self.saver.wait()
        except StorageError as error:
            self._note_failure(error, final=final)
        self.collect_finished()

    def _mark_failed(self) -> None:
        self._last_save.failed = True
        self._metrics.forget_best(self._last_save.step)

    def _note_failure(
        self, error: StorageError, *, then: str = "training continues", final: bool | None = None
    ) -> None:
        """Reports that the last save failed; raises if another process has the run, or if this is `final`.

        By default it is final if saves have failed too often.
        """
        if isinstance(error, RunLocked):
            raise error
        save = self._last_save
        self._mark_failed()
        self._failures += save.scheduled
        if self._failures >= MAX_FAILURES if final is None else final:
            raise StorageError(f"{error}; {self._describe_newest()}") from error
        self._log(
            f"the save at step {save.step:,} failed, {then}: {error}; {self._describe_newest()}",
            logging.WARNING,
        )

    @property
    def checkpoint_age_s(self) -> float | None:
        """Seconds since the newest whole checkpoint was written, as far as this rank knows; None if there is none."""
        return None if self._newest is None else time.monotonic() - self._newest[1]

    def _describe_newest(self) -> str:
        if self._newest is None:
            return "there is no checkpoint yet"
        age = format_duration(time.monotonic() - self._newest[1])
        return f"the newest checkpoint is that of step {self._newest[0]:,}, written {age} ago"

    def _write(self, *, scheduled: bool) -> None:
        """Writes a checkpoint of this state, or begins to, unless a save that failed has left a complete one."""
        pipe, place, last = self.pipe, self._place(), self._last_save
        replaces = last.replaces if last.place == place else last.step == place.step
        if last.place == place and not replaces and from_root(self._was_committed):
            last.failed, self._newest = False, (place.step, time.monotonic())
            return
        self._last_save = SaveAttempt(place=place, scheduled=scheduled, replaces=replaces)
        failpoint("train.save")
        self._rehearsal.before_save()
        state.check_weights(self.run, from_root=self._saves_root_state)
        self._unsaved.check()
        self.shapes.check()
        facts = self._before_validation or self.rank_state.capture()
        shared = self._metrics.state_dict() | {"seed": torch.initial_seed(), "datasets": facts["shared"]}
        shared |= {"fingerprints": self._fingerprints, "adapters": state.adapters(pipe)}
        shared["adapter_names"] = state.adapter_names(pipe)
        shared["settings"] = self._registered
        shared["rates"] = {name: schedule.used_rates() for name, schedule in self.run.schedules.items()}
        if self.run.media and self._before_validation is None:  # a resumed run repeats the whole validation
            self.run.media.save_point(self.run.steps_done)
        with temporary_state(None, pipe.device):  # a state_dict() of the user's may draw random numbers
            gathered = state.gather(self.run) | {"run": shared}
        rank_states.check_equal(pipe, gathered["registered"])
        self.saver.save(
            state.contribution(pipe, gathered, from_root=self._saves_root_state),
            step=self.run.steps_done,
            local=facts["local"],
            metrics=self._metrics.scalars(self.run.steps_done),
            before_write=self.run.flush_before_save(),
            replaces=replaces,
        )
        self.collect_finished()

    def _was_committed(self) -> bool:
        """Whether a save that failed has still been committed, on rank 0's disk: a checkpoint is never overwritten."""
        path = self.pipe.directory.checkpoint_dir(self.run.steps_done)
        with files.storage(f"look for {path}"):
            if not path.exists():
                return False
            files.sync_dir(path.parent)  # the save may have failed in this call
            return True

    # --- restoring

    def _restore_position(self, found: checkpoint.LoadedCheckpoint) -> None:
        state.restore_position(self.run, found.state)
        self.pipe.history.read_from(RunPaths(path=found.path.parent.parent).metrics_file(0))

    def _restore(self, found: checkpoint.LoadedCheckpoint) -> None:
        """Restores a checkpoint; raises `UsageError` if what is restored is not what was loaded."""
        self.run.begin_averages()  # the checkpoint may have only a part of an average, or nothing
        exchange = RankExchange(f"compare the state of step {found.step}")
        try:
            loaded = load_parts(found, partial(state.destinations, self.pipe))
        except UsageError as error:  # the script has changed since
            raise UsageError(f'{error} (to start a new run, pass resume="never")') from error
        described = state.describe(loaded.state)
        state.restore(self.run, loaded.state)
        unequal = [
            each for each in exchange.all_gather(partial(state.find_unequal, self.run, described)) if each
        ]
        if unequal:
            raise UsageError(
                f"{unequal[0]} is not what the checkpoint of step {loaded.step:,} has, after load_state_dict(): let it "
                'restore all that state_dict() returns, or start a new run with resume="never"'
            )
        self._last_save = SaveAttempt(place=self._place(), scheduled=False)
        self._metrics.load_state_dict(loaded.state["run"])
        self._metrics.add(loaded.step, loaded.metrics)  # for a checkpoint that replaces it
        for name, rates in loaded.state["run"].get("rates", {}).items():  # older checkpoints have none
            if self.run.schedules[name].every == "step":
                self.run.schedules[name].used[:] = rates
        age_s = attempts.seconds_since(self.pipe.directory.checkpoint_dir(loaded.step))
        self._newest = loaded.step, time.monotonic() - age_s
        self.rank_state.restore(loaded)

    def _log(self, message: str, level: int = logging.INFO) -> None:
        """Logs on rank 0 only."""
        if self.pipe.world.is_root:
            logger.log(level, message)
