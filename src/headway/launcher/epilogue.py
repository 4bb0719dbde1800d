"""What a job does when its ranks have ended: report why, and queue itself again if it was only stopped.

The job script calls it as its last command, so its exit code is the job's: with the exit status of the agents' step, or
with the step's process while that runs. Then it is there before the ranks end, when every second counts, and ends a
step that outlives its agents. On a cancel and a requeue by others the scheduler ends this process, too, and it has no
say. At the time limit the scheduler would end the job for good, and so a job that is not over is queued again.
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
from functools import cache
from typing import Any

from headway.dist.control.signals import END_OF_TIME, STOP_REQUESTS
from headway.dist.failure.record import FailureRecord, describe_exit_status
from headway.errors import DONE, TERMINATED, HeadwayError, Stopped, StorageError, UsageError
from headway.launcher.agent.launch_records import LaunchRecords, Outcome
from headway.launcher.agent.outcome import is_crash, reason, summary
from headway.launcher.enqueue import submit_successor
from headway.launcher.program import JobFile
from headway.launcher.step import Step, StepEnd
from headway.record.alerts import Alert, AlertChannels, AlertEvent, AlertSender, alert_events
from headway.run import Run
from headway.run.exit_codes import EXIT_CODES
from headway.run.info import newest_step
from headway.run.job_record import ends_at_same_step, is_in_last_lines, record_end
from headway.run.status import NOT_OF_A_RANK
from headway.schedulers.base import JobIds
from headway.system.environment import EARLIER_STARTS
from headway.system.limits import process_age_s
from headway.system.log import install_handler, logger, print_last
from headway.system.text import format_duration

_RESTART_S = 60.0
"""how long agents may take to agree on another round"""
_TIMED_OUT = (
    "the time limit of the job came before its ranks had stopped; give them more time by --signal-lead"
)
_SETTLE_S = 3.0
"""how long a network file system may hide the last record of an agent"""
_TROUBLE_S = 30.0
"""how long it may refuse to be read at all"""
_ALERT_S = 10.0
"""how long the end of a job waits for the alert about it"""
_CLOCK_S = 30.0
"""by how much the clock of a node may be behind that of the scheduler"""
_EARLY = 0.1
"""a start that is told within this part of its time limit that its time is over has a wrong clock"""
_SAME_STEP_ENDS = 3
"""after so many ends by the time limit with no newer checkpoint, another start would end like them"""


def main(path: str, status: str, pid: str | None = None, *agents: str) -> int:
    """Returns the exit code of the job in whose script this runs.

    `status` is that of the agents (of the prologue, if that has failed), or the word `--step` for a step that still
    runs, and `pid` its process, a child of this one. With the word `--prologue` that step prepares the nodes, and
    `agents` is the command that follows it.
    """
    install_handler()
    with _noting_termination() as signals:
        try:
            run = Run.open_private(path)
            job = JobFile.read(run)
            nodes = job.target.scheduler.node_count(os.environ) or job.target.node_range[1]
            records = LaunchRecords(job.launch_directory(run, os.environ), size=nodes)
            end, staging = _await_end(status, int(pid or 0), agents, job, records, signals)

            @cache
            def ended_by_others() -> bool:  # asked once: between SIGTERM and SIGKILL there is little time
                return _ended_by_others(run, job, os.environ)

            def left_to_scheduler() -> bool:
                return bool(signals) and ended_by_others()

            if left_to_scheduler():
                return TERMINATED
            return _finish(run, job, records, end, left_to_scheduler, staging=staging)
        except HeadwayError as error:
            logger.error(error)
            return error.exit_code


def _ended_by_others(run: Run, job: JobFile, environ: Mapping[str, str]) -> bool:
    """Whether others end the job, and not its time limit; if so, says whether it comes back."""
    scheduler = job.target.scheduler
    answer = scheduler.ended_by(job.ids(environ))
    why = "the job was cancelled"
    if answer is None:
        end = scheduler.end_time(environ)
        answer = "time limit" if end is not None and time.time() > end - _CLOCK_S else "cancel"
        why = f"{scheduler.label} does not say why it ends this job, and its time limit is not reached"
    if answer == "requeue":
        logger.info("stopped by a preemption or a requeue; %s starts the job again", scheduler.label)
    elif answer == "cancel":
        logger.info("not queued again: %s; to resume: %s", why, scheduler.submit_command(run.job_script))
    return answer != "time limit"


@contextmanager
def _noting_termination() -> Iterator[list[int]]:
    """Collects SIGTERM instead of ending by it: at the time limit there is still something to do.

    Requests to stop are for the ranks, and `scancel --full --signal` sends them to the job's script as well.
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
    """Handles a signal; one that is ignored would stay ignored in the step that this process starts."""


def _await_end(
    status: str,
    pid: int,
    agents: tuple[str, ...],
    job: JobFile,
    records: LaunchRecords,
    signals: Sequence[int],
) -> tuple[StepEnd, bool]:
    """Waits for the steps of the job; returns how the last one ended, and whether it only prepared the nodes."""
    if status == "--prologue":
        end = Step(pid, records).wait_prepared(until=lambda: signals)
        if end != StepEnd(status=DONE):
            return end, True
        if signals:  # the nodes were prepared just as the job had to end
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
    staging: bool,
) -> int:
    """Reports how the launch ended, and queues the job again if it is not over."""
    outcome = read_outcome(records, end, staging=staging)
    if outcome["exit_code"] == Stopped.exit_code and (fault := _why_too_early(run, job, os.environ)):
        outcome = {"exit_code": 1, "record": {"kind": "step", "error": fault, "exit_code": 1}}
    lost = ", ".join(records.host(number) for number in end.lost)
    shutil.rmtree(records.directory, ignore_errors=True)  # an agent on a lost node may still be writing there
    code = int(outcome["exit_code"])
    if run.was_replaced():  # this node was cut off, and the scheduler could not end us
        label = job.target.scheduler.label
        logger.warning("%s has started this job again meanwhile; this start leaves the run to it", label)
        return code
    if lost and not staging:
        logger.error(
            "the agent on %s left no record, and the job's step waited for it: the step was ended", lost
        )
    record = outcome.get("record") or {}
    if record.get("kind") in NOT_OF_A_RANK:
        record["failure_file"] = str(run.failure_file)
    try:
        if not record.get("locked_out"):  # else the run is another job's, which may have ended meanwhile
            record_end(run, code, error=reason(outcome) or None)
            if record.get("kind") in NOT_OF_A_RANK:
                run.write_failure(record, instead=True)
    except StorageError as error:  # it may be the cause itself; the job ends by that, and not by this
        logger.error("%s", error)
        record.pop("failure_file", None)  # there is none to read
    if code:
        print_last(summary(outcome, records.size * job.target.nproc_per_node))
    # an error of a rank comes again, and a node that is only slow to end is no reason to try
    kind = record.get("kind")
    lost_node = is_crash(outcome) and (kind == "lost" or (lost and kind == "vanished"))
    is_over = code not in (Stopped.exit_code, TERMINATED) and not lost_node
    then = ""
    if not is_over and not left_to_scheduler():
        then = _why_hopeless(run, job) or requeue(run, job, os.environ)
        logger.info(then)
    if job.target.alert:
        _alert(run, job, code, "; ".join(filter(None, (reason(outcome), then))))
    return code


def _why_too_early(run: Run, job: JobFile, environ: Mapping[str, str]) -> str | None:
    """Why a start that its own clock has stopped is at fault, in a sentence; None if its time was over.

    Each further start would end like it. How long it took is measured on this node alone: by the age of this process,
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
        f"{format_duration(limit_s)}: the clock of {last.get('host')} is wrong (look with: date), or a save takes "
        f"longer than the job; not queued again; to resume: {scheduler.submit_command(run.job_script)}"
    )


def _last_attempt(run: Run, ids: JobIds) -> Mapping[str, Any]:
    """The last attempt of the run, if this start of the job made it and it has ended."""
    with suppress(UsageError):  # run.json cannot be read, and the end must be reported all the same
        last: Mapping[str, Any] = (run.info()["attempts"] or [{}])[-1]
        made_by = JobIds.from_dict(last)
        if last.get("ended") and made_by and made_by.start == ids.start:
            return last
    return {}


def _alert(run: Run, job: JobFile, code: int, why: str) -> None:
    """Sends the alert of this end, as the last thing that the job does; a dead server costs a few seconds at most."""
    event: AlertEvent = "failed" if code else "finished"
    if code in (Stopped.exit_code, TERMINATED):
        event = "stopped"
    try:
        sender = AlertSender(AlertChannels.from_environment(), alert_events(job.target.alert))
        attempts = len(run.info()["attempts"])
    except HeadwayError as error:  # the variables of the login node are not always those of the job
        logger.warning("no alert was sent: %s", error)
        return
    sender.send(run, Alert.of(run, event, attempts=attempts, why=why, step=newest_step(run.path)))
    sender.wait(_ALERT_S)


def _why_hopeless(run: Run, job: JobFile) -> str | None:
    """Why another start would end like the last ones, in a sentence; None if it may get further."""
    ends, step = ends_at_same_step(run), newest_step(run.path)
    if ends < _SAME_STEP_ENDS:
        return None
    if is_in_last_lines(run):
        how, advice = "after the training was done, in the rest of its script", "give it more time by --time"
    else:
        how = "without a checkpoint" if step is None else f"with the newest checkpoint at step {step:,}"
        advice = "save more often, or give it more time by --time or --signal-lead"
    resume = job.target.scheduler.submit_command(run.job_script)
    return f"not queued again: it was ended {ends} times {how}; {advice}; to resume: {resume}"


def read_outcome(records: LaunchRecords, end: StepEnd, *, staging: bool = False) -> Outcome:
    """How the launch ended, from what its agents have left, and from how their step ended.

    With `staging`, that step was to prepare the nodes: to examine them, or to copy data to them.
    """
    if end.lost and staging and not records.outcome():  # srun kills the others when one has failed
        return _by_lost_nodes(records, end)
    if end.status is not None and not end.lost:
        if records.missing() and records.trouble:
            records.settle(_TROUBLE_S)
        elif records.ends():
            records.settle(_SETTLE_S)
    return _by_agents(records, end) or _by_status(end.status, staging=staging) or _by_ranks(records, end)


def _by_lost_nodes(records: LaunchRecords, end: StepEnd) -> Outcome:
    """The outcome of a preparation during which nodes fell silent."""
    hosts = ", ".join(records.host(number) for number in end.lost)
    error = f"{hosts} is lost: it was silent while the nodes were prepared for the ranks"
    return {"exit_code": 1, "record": {"kind": "lost", "host": hosts, "error": error, "exit_code": 1}}


def _by_agents(records: LaunchRecords, end: StepEnd) -> Outcome | None:
    """What the agents have recorded; None if that does not explain the end of all of them."""
    outcome: Outcome = records.outcome() or {"exit_code": DONE, "record": None}
    ends = records.ends()
    code = outcome["exit_code"] or max(ends.values(), default=DONE)
    # srun ends all agents by SIGTERM when one of them fails, as SLURM does when the job must go: only in the second
    # case does each of them leave a record
    if code in (DONE, TERMINATED) and len(ends) < records.size:
        return None
    return _by_killed_agent(records, end, outcome.get("record")) or outcome | {"exit_code": code}


def _by_status(status: int | None, *, staging: bool) -> Outcome | None:
    """What the exit status of the step says by itself; None if it is only that something has failed.

    Without a status, the step was still running when the job had to end.
    """
    record: FailureRecord | None = {"sentence": "stopped before the ranks had started"}
    if status is None:
        code, record = TERMINATED, {"sentence": _TIMED_OUT}
    elif staging and status in (TERMINATED, Stopped.exit_code):
        code = status
    elif status - 128 in STOP_REQUESTS:
        # an agent that had only just been started had no handler yet, and the signal ended it
        code = Stopped.exit_code
    elif status in EXIT_CODES and status < 128:
        # the disk may be full, so that no agent could record its end; above, the codes are those of signals, too
        code, record = status, None
    elif staging:
        how = describe_exit_status(status if status <= 128 else 128 - status)
        sentence = f"the step that prepares the nodes {how}; its output, above, says more"
        code, record = 1, {"kind": "staging", "sentence": sentence}
    else:
        return None
    return {"exit_code": code, "record": record}


def _by_ranks(records: LaunchRecords, end: StepEnd) -> Outcome:
    """What the ranks have agreed on, if their agents could not record it; else who was killed, as far as is known."""
    record = records.failure()
    if record and record["kind"] != "vanished":
        return {"exit_code": int(record["exit_code"]), "record": record}
    return _by_killed_step(end) or _by_killed_agent(records, end, record) or _without_record(records, end)


def _by_killed_step(end: StepEnd) -> Outcome | None:
    """The outcome of a step whose own process was killed: its agents are then ended with the job."""
    if end.killed_by is None or end.lost:
        return None
    how = describe_exit_status(-end.killed_by)
    error = f"the process of the job's step (srun) {how}, and the ranks were ended with it"
    return {"exit_code": 1, "record": {"kind": "step", "error": error, "exit_code": 1}}


def _by_killed_agent(records: LaunchRecords, end: StepEnd, record: FailureRecord | None) -> Outcome | None:
    """The outcome of a launch in which a rank is gone because its agent was killed; `record` is that of the rank."""
    if not record or record["kind"] != "vanished" or end.status is None or end.lost:
        return None
    number = records.agent_of(record["rank"])
    return None if number not in records.missing() else _without_record(records, end, (number,), record)


def _without_record(
    records: LaunchRecords,
    end: StepEnd,
    agents: Sequence[int] = (),
    record: FailureRecord | None = None,
) -> Outcome:
    """The outcome of a launch whose agents, or these of them, have ended without a record."""
    agents, status = agents or records.missing(), end.status or 0
    hosts = ", ".join(records.host(number) for number in agents)
    if status > 128 and status not in records.ends().values():
        how = f"{describe_exit_status(128 - status)}, and its ranks with it"
    elif records.ends():  # the exit status is that of another one, which had to end
        how = f"{describe_exit_status(-signal.SIGKILL)}, and its ranks with it"
    else:
        how = (
            f"ended without a record; the exit status of its step is {status}, and the output above says more"
        )
    known = {"rank": None, "pid": None, "step": None, **(record or {}), "hint": None}
    trouble = f" ({records.directory} cannot be read: {records.trouble})" if records.trouble else ""
    error = f"the agent on {hosts} {how}{trouble}"
    return {
        "exit_code": 1,
        "record": {**known, "kind": "agent", "host": hosts, "error": error, "exit_code": 1},
    }


def requeue(run: Run, job: JobFile, environ: Mapping[str, str]) -> str:
    """Queues the job again, if it may; returns what was done, in a sentence."""
    target, scheduler, ids = job.target, job.target.scheduler, job.ids(environ)
    starts = int(environ.get(EARLIER_STARTS, "0")) + ids.restarts + 1
    by_hand = f"to resume: {scheduler.submit_command(run.job_script)}"
    if not target.requeue:
        return f"not queued again, as requeue is off; {by_hand}"
    if starts > target.max_requeues:
        return (
            f"not queued again: it was {starts - 1} times, and max_requeues={target.max_requeues}; {by_hand}"
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
