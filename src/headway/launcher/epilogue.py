"""The last command of a job: reports how the ranks ended, and queues the job again if it was only stopped.

Its exit code is the job's. The job script passes it the exit status of the agents' step, or the process of a step that
still runs: then it is already running when the ranks end and every second counts, and it ends a step that outlives its
agents. On a cancel, and on a requeue by others, the scheduler ends this process as well and decides what follows. At
the time limit the scheduler would end the job for good, so an unfinished job is queued again here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from headway.dist.control.signals import END_OF_TIME, STOP_REQUESTS
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped, StorageError, UsageError
from headway.launcher.agent.launch_records import LaunchRecords, Outcome
from headway.launcher.agent.outcome import is_crash, reason, summary
from headway.launcher.agent.step_outcome import StepEnd, read_outcome
from headway.launcher.enqueue import submit_successor
from headway.launcher.program import JobFile
from headway.launcher.step import Step
from headway.record.alerts import Alert, AlertChannels, AlertEvent, AlertSender, alert_events
from headway.run import Run
from headway.run.info import newest_step
from headway.run.job_record import is_in_last_lines, record_end
from headway.run.progress import JobProgress
from headway.run.status import NOT_OF_A_RANK
from headway.schedulers.base import JobIds
from headway.system.environment import EARLIER_STARTS
from headway.system.limits import process_age_s
from headway.system.log import install_handler, logger, print_last
from headway.system.text import format_duration

_RESTART_S = 60.0
"""how long agents may take to agree on another round"""
_LAST_RECORDS_S = 5.0
"""how long ranks that their job ends may take, of the time until the scheduler kills this process"""
_ALERT_S = 10.0
"""how long the end of a job waits for its alert to be sent"""
_CLOCK_S = 30.0
"""by how much the clock of a node may be behind the scheduler's"""
_EARLY = 0.1
"""a start whose own clock ends it within this fraction of its time limit has a wrong clock"""
_SAME_STEP_ENDS = 3
"""after this many ends by the time limit without a newer checkpoint, another start would end the same way"""


def main(path: str, status: str, pid: str | None = None, *agents: str) -> int:
    """Ends the job in whose script this runs, and returns its exit code.

    `status` is the exit status of the agents' step, or of the prologue if it failed. It is the word `--step` for a step
    that still runs, whose process `pid` is a child of this one. It is the word `--prologue` if that step prepares the
    nodes; `agents` is then the command to run next.
    """
    install_handler()
    with _collect_sigterm() as signals:
        try:
            run = Run.open_private(path)
            job = JobFile.read(run)
            nodes = job.target.scheduler.node_count(os.environ) or job.target.node_range[1]
            records = LaunchRecords(job.launch_directory(run, os.environ), size=nodes)
            end, is_prologue = _await_end(status, int(pid or 0), agents, job, records, signals)
            while (fewer := _usable_nodes(job, records, end, is_prologue=is_prologue)) and not signals:
                step = job.target.scheduler.resized(agents, fewer)
                if step is None:
                    break
                shutil.rmtree(records.directory, ignore_errors=True)
                records = LaunchRecords(records.directory, size=fewer)
                pid_of_step = os.posix_spawnp(step[0], step, os.environ)
                end = Step(pid_of_step, records).wait(until=lambda: signals)
            # asked once: between SIGTERM and SIGKILL there is little time
            ended_by_others = cache(partial(_ended_by_others, run, job, os.environ))

            def left_to_scheduler() -> bool:
                return bool(signals) and ended_by_others()

            if left_to_scheduler():
                return TERMINATED
            code = _finish(run, job, records, end, left_to_scheduler, is_prologue=is_prologue)
            _remove_records(run, records, end)
            return code
        except HeadwayError as error:
            logger.error(error)
            return error.exit_code


def _usable_nodes(job: JobFile, records: LaunchRecords, end: StepEnd, *, is_prologue: bool) -> int | None:
    """Returns on how many of its nodes a job must start again, since its ranks cannot share their global batch.

    None if they can, or if no smaller number of nodes is both allowed and usable.
    """
    least, most = job.target.node_range
    if least == most or is_prologue or end.status in (None, DONE):
        return None
    size = (records.failure() or {}).get("global_batch_size")
    per_node = job.target.nproc_per_node
    usable = (
        nodes for nodes in range(records.size - 1, least - 1, -1) if size and not size % (nodes * per_node)
    )
    fewer = next(usable, None)
    if fewer is not None:
        logger.info(
            "global_batch_size=%d cannot be split into %d equal parts: %d of the %d nodes are used",
            size, records.size * per_node, fewer, records.size,
        )  # fmt: skip
    return fewer


def _ended_by_others(run: Run, job: JobFile, environ: Mapping[str, str]) -> bool:
    """Whether somebody else ends the job, and not its time limit; if so, logs whether it starts again."""
    scheduler = job.target.scheduler
    ended_by = scheduler.ended_by(job.ids(environ))
    why = "the job was cancelled"
    if ended_by is None:
        end = scheduler.end_time(environ)
        ended_by = "time limit" if end is not None and time.time() > end - _CLOCK_S else "cancel"
        why = (
            f"{scheduler.label} does not report why it ends this job, and its time limit has not been reached"
        )
    if ended_by == "requeue":
        logger.info("stopped by a preemption or a requeue; %s starts the job again", scheduler.label)
    elif ended_by == "cancel":
        logger.info("not queued again: %s; to resume: %s", why, scheduler.submit_command(run.job_script))
    return ended_by != "time limit"


@contextmanager
def _collect_sigterm() -> Iterator[list[int]]:
    """Collects SIGTERM in a list instead of ending this process: at the time limit there is still work to do.

    Stop requests are meant for the ranks, but `scancel --full --signal` sends them to the job's script as well.
    """
    signals: list[int] = []
    before = {number: signal.signal(number, _do_nothing) for number in STOP_REQUESTS}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do_nothing(*_: object) -> None:
    """Handles a signal by doing nothing: the step that this process starts would inherit an ignored signal."""


def _await_end(
    status: str,
    pid: int,
    agents: tuple[str, ...],
    job: JobFile,
    records: LaunchRecords,
    signals: Sequence[int],
) -> tuple[StepEnd, bool]:
    """Waits for the steps of the job; returns how the last one ended, and whether that is the prologue."""
    if status == "--prologue":
        end = Step(pid, records).wait_prepared(until=lambda: signals)
        if end != StepEnd(status=DONE):
            return end, True
        if signals:  # the job has to end just when the nodes are ready
            return StepEnd(status=TERMINATED), True
        pid = os.posix_spawnp(agents[0], agents, os.environ)
    elif status != "--step":
        has_prologue = bool(job.target.pre or job.target.doctor)
        return StepEnd(status=int(status)), has_prologue and not records.is_prepared()
    spare_s = _RESTART_S if job.target.max_restarts else 0.0
    return Step(pid, records, spare_s=spare_s).wait(until=lambda: signals), False


def _finish(
    run: Run,
    job: JobFile,
    records: LaunchRecords,
    end: StepEnd,
    left_to_scheduler: Callable[[], bool],
    *,
    is_prologue: bool,
) -> int:
    """Reports how the launch ended, and queues the job again if it is not over."""
    outcome = read_outcome(records, end, is_prologue=is_prologue)
    if outcome["exit_code"] == Stopped.exit_code and (fault := _why_too_early(run, job, os.environ)):
        outcome = {"exit_code": 1, "record": {"kind": "step", "error": fault, "exit_code": 1}}
    lost_hosts = records.hosts(end.lost)
    code = int(outcome["exit_code"])
    if run.was_replaced():  # this node was cut off, so the scheduler could not end this process
        label = job.target.scheduler.label
        logger.warning("%s has started this job again meanwhile; the new start owns the run", label)
        return code
    if lost_hosts and not is_prologue:
        logger.error(
            "the agent on %s left no record, and the job's step waited for it: the step was ended", lost_hosts
        )
    progress = job.target.progress and str(Path(job.program.cwd or "", job.target.progress))
    _record_end(run, outcome, progress)
    if code:
        print_last(summary(outcome, records.size * job.target.nproc_per_node))
    requeued = ""
    if not _is_over(outcome, lost_agents=bool(end.lost)) and not left_to_scheduler():
        requeued = _why_hopeless(run, job) or requeue(run, job, os.environ)
        logger.info(requeued)
    if job.target.alert:
        _alert(run, job, code, "; ".join(filter(None, (reason(outcome), requeued))))
    return code


def _remove_records(run: Run, records: LaunchRecords, end: StepEnd) -> None:
    """Removes what the agents have left; those of a step that still runs may have to record how their ranks end.

    What they leave then is removed at the end of the next start.
    """
    if end.status is None:
        records.settle(_LAST_RECORDS_S)
        if records.missing():
            return
    with suppress(OSError):  # there is none, or the storage may be what failed
        last = records.directory.stat().st_mtime
        for each in run.launch_dir.iterdir():
            if each.stat().st_mtime <= last:  # not of a start that has replaced this one
                shutil.rmtree(each, ignore_errors=True)  # an agent on a lost node may still be writing there
        run.launch_dir.rmdir()


def _record_end(run: Run, outcome: Outcome, progress: str) -> None:
    """Records the end in the run, and adds to the record of a failure where people can read it."""
    record = outcome.get("record") or {}
    if record.get("kind") in NOT_OF_A_RANK:
        record["failure_file"] = str(run.failure_file)
    try:
        if not record.get("locked_out"):  # else another job owns the run, and may have ended meanwhile
            record_end(run, int(outcome["exit_code"]), error=reason(outcome) or None, progress=progress)
            if record.get("kind") in NOT_OF_A_RANK:
                run.write_failure(record, overwrite=True)
    except StorageError as error:  # the storage may be the cause; the exit code stays the one of the outcome
        logger.error("%s", error)
        record.pop("failure_file", None)  # there is none to read


def _is_over(outcome: Outcome, *, lost_agents: bool) -> bool:
    """Whether no further start is needed: only a stop and a lost node are worth another one.

    The error of a rank would occur again. A node that is only slow to end is not lost.
    """
    kind = (outcome.get("record") or {}).get("kind")
    lost_node = is_crash(outcome) and (kind == "lost" or (lost_agents and kind == "vanished"))
    return outcome["exit_code"] not in (Stopped.exit_code, TERMINATED) and not lost_node


def _why_too_early(run: Run, job: JobFile, environ: Mapping[str, str]) -> str | None:
    """Returns, in a sentence, why a start that its own clock stopped ended too early; None if its time was over.

    Every further start would end the same way. The duration is measured on this node alone: by the age of this process,
    which was the job's script, and by its ranks, which began later.
    """
    scheduler, last = job.target.scheduler, _last_attempt(run, job.ids(environ))
    if END_OF_TIME not in last.get("why", "") or (limit_s := scheduler.time_limit_s(environ)) is None:
        return None
    took = datetime.fromisoformat(last["ended"]) - datetime.fromisoformat(last["started"])
    took_s = max(took.total_seconds(), process_age_s())
    if took_s > _EARLY * limit_s:
        return None
    return (
        f"the run was stopped by {END_OF_TIME} {format_duration(took_s)} after its start, of "
        f"{format_duration(limit_s)}: the clock of {last.get('host')} is wrong (check with: date), or a save takes "
        f"longer than the job; not queued again; to resume: {scheduler.submit_command(run.job_script)}"
    )


def _last_attempt(run: Run, ids: JobIds) -> Mapping[str, Any]:
    """Returns the last attempt of the run if this start of the job made it and it has ended; else an empty mapping."""
    with suppress(UsageError):  # the end must be reported even if run.json cannot be read
        last: Mapping[str, Any] = (run.info()["attempts"] or [{}])[-1]
        made_by = JobIds.from_dict(last)
        if last.get("ended") and made_by and made_by.start == ids.start:
            return last
    return {}


def _alert(run: Run, job: JobFile, code: int, why: str) -> None:
    """Sends the alert about this end, last of all; a dead server costs a few seconds at most."""
    event: AlertEvent = "failed" if code else "finished"
    if code in (Stopped.exit_code, TERMINATED):
        event = "stopped"
    try:
        sender = AlertSender(AlertChannels.from_environment(), alert_events(job.target.alert))
        attempts = len(run.info()["attempts"])
    except HeadwayError as error:  # the job may not have the variables of the login node
        logger.warning("no alert was sent: %s", error)
        return
    sender.send(run, Alert.of(run, event, attempts=attempts, why=why, step=_newest_step(run)))
    sender.wait(_ALERT_S)


def _newest_step(run: Run) -> int | None:
    """Returns the newest checkpoint's step, and None where it cannot be read: the job is queued again all the same."""
    with suppress(StorageError):
        return newest_step(run.path)
    return None


def _why_hopeless(run: Run, job: JobFile) -> str | None:
    """Returns, in a sentence, why another start would end like the last ones; None if it may get further."""
    progress, step, target = JobProgress.read(run), _newest_step(run), job.target
    if progress is None:
        return None
    capped = progress.same_step_ends >= target.max_attempts
    if progress.idle_ends < _SAME_STEP_ENDS and not capped:
        if progress.counted:
            logger.info("no checkpoint of headway, but progress: %s", progress.counted)
        return None
    ends = progress.same_step_ends if capped else progress.idle_ends
    if is_in_last_lines(run):
        how = "after the training was done, in the rest of its script"
        advice = "give it more time with --time"
    else:
        how = "without a checkpoint" if step is None else f"with the newest checkpoint at step {step:,}"
        how += f" (max_attempts={target.max_attempts})" if capped else ""
        own = f" or files in {target.progress}" if target.progress else ""
        advice = "" if capped else f"there are no new metric rows{own}; "
        advice += "save more often, or give it more time with --time or --signal-lead"
        if not target.progress:
            advice += "; if the script keeps checkpoints of its own, name their directory with --progress"
    resume = job.target.scheduler.submit_command(run.job_script)
    return f"not queued again: it was ended {ends} times {how}; {advice}; to resume: {resume}"


def requeue(run: Run, job: JobFile, environ: Mapping[str, str]) -> str:
    """Queues the job again, if its settings allow that; returns what was done, in a sentence."""
    target, scheduler, ids = job.target, job.target.scheduler, job.ids(environ)
    starts = int(environ.get(EARLIER_STARTS, "0")) + ids.restarts + 1
    by_hand = f"to resume: {scheduler.submit_command(run.job_script)}"
    if not target.requeue:
        return f"not queued again, as requeue is off; {by_hand}"
    if starts > target.max_requeues:
        return (
            f"not queued again: it has been queued again {starts - 1} times, "
            f"and max_requeues={target.max_requeues}; {by_hand}"
        )
    logger.info("queueing job %s again (%d of at most %d)", ids.number, starts, target.max_requeues)
    refused = scheduler.requeue(ids)
    if refused is None:
        return "queued again"
    successor = submit_successor(run, job, ids, {EARLIER_STARTS: str(starts)})
    return (
        f"job {successor.job_id} resumes the run when this one is over "
        f"({scheduler.label} does not requeue it: {refused})"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
