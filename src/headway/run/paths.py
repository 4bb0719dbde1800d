"""Every path in a run directory, except for those within `launch/`, `call/`, `lock/` and checkpoints.

runs/digits-2026.11.15-14.30-x7k2/
    run.json                    what ran, from which code, on which versions; the list of attempts
    config.yaml                 the settings, resolved             plan.json, report.html
    job.sh, job.json            the job script and its settings    submitted.json, ended.json, launch/, doctor.json
    code/uncommitted.diff       changes since the commit           code/tree/: the code of a submitted job
    code/sources-1.json         the script and its own modules, as attempt 1 began with them
    work/                       where a submitted job starts, and writes by relative paths
    log/rank-00000.txt          log/diagnostics.jsonl, log/job.txt
    metrics/rank-00000.jsonl    metrics.csv, tensorboard/          traces/
    checkpoints/step-000000001000/
    eval/NAME.jsonl             results of evaluations, a row each: weights, metrics, path of the predictions
    media/rank-00000.jsonl      index of images, figures, histograms and texts; media/rank-00000/: the files
    ledger.jsonl                samples and loss of each step, if a ledger was enabled
    events.jsonl                checkpoints, restarts, stops, warnings; log/events-00003.jsonl: warnings of rank 3
    nodes/cn-l084.jsonl         samples of the devices of a node
    alerts/failed-1.json        an alert that was sent, and the process that claimed and sent it
    failure.json                the first failing rank of this attempt; failure-N.json: of attempt N
    lock/                       which process trains here: see `headway.run.lock`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from headway.system import ownership

_STEP = re.compile(r"step-([0-9]{12,18})")


def step_name(step: int) -> str:
    """Returns the directory name of a checkpoint; names sort as steps do.

    >>> step_name(1000)
    'step-000000001000'
    """
    return f"step-{step:012d}"


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint from the name of its directory; None for any other name.

    >>> step_of("step-000000001000"), step_of("latest")
    (1000, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def _rank_suffix(rank: int) -> str:
    return f"-{rank:05d}" if rank else ""


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The files and directories of one run directory."""

    path: Path

    def check_private(self) -> None:
        """Raises `UsageError` if other users could write files that a job reads and executes.

        Checks every directory from the root down, and the files that determine what runs. Call it before a job is
        submitted, and again in the job: others may have replaced the run while it was queued.
        """
        ownership.check_root(self.path.parent)
        ownership.check_private(self.path)
        for path in (
            self.info_file,
            self.job_file,
            self.job_script,
            self.code_dir,
            self.snapshot_dir,
            self.work_dir,
            self.call_dir,
            self.launch_dir,
        ):
            if os.path.lexists(path):
                ownership.check_private(path)
        for path in (self.metrics_dir, self.log_dir, self.lock_dir):  # these may be links to another disk
            if path.exists():
                ownership.check_private(path.resolve())

    # --- the run as a whole

    @property
    def info_file(self) -> Path:
        """What ran, from which code, on which versions; the list of attempts."""
        return self.path / "run.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def sweep_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def lock_dir(self) -> Path:
        return self.path / "lock"

    @property
    def failure_file(self) -> Path:
        """The first failing rank of the current attempt."""
        return self.path / "failure.json"

    def old_failure_file(self, attempt: int) -> Path:
        """The first failing rank of an earlier attempt."""
        return self.path / f"failure-{attempt}.json"

    # --- the job

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def job_file(self) -> Path:
        """The command of the job, and its resources."""
        return self.path / "job.json"

    @property
    def submission_file(self) -> Path:
        """The scheduler's ids of the job, or the process that runs it."""
        return self.path / "submitted.json"

    @property
    def ended_file(self) -> Path:
        """When the job ended, and with which exit code."""
        return self.path / "ended.json"

    @property
    def doctor_file(self) -> Path:
        """Results of the node checks that run before the ranks start."""
        return self.path / "doctor.json"

    @property
    def starts_file(self) -> Path:
        """When the job was started, and when each start ended."""
        return self.path / "starts.jsonl"

    @property
    def launch_dir(self) -> Path:
        return self.path / "launch"

    @property
    def call_dir(self) -> Path:
        """A function to call, and its result."""
        return self.path / "call"

    @property
    def code_dir(self) -> Path:
        return self.path / "code"

    @property
    def snapshot_dir(self) -> Path:
        return self.code_dir / "tree"

    def sources_file(self, attempt: int) -> Path:
        """The script and its own modules, as this attempt began with them."""
        return self.code_dir / f"sources-{attempt}.json"

    @property
    def work_dir(self) -> Path:
        """Where the ranks of a job start, and leave what they write by relative paths."""
        return self.path / "work"

    @property
    def diff_file(self) -> Path:
        """Changes that are not in the commit."""
        return self.code_dir / "uncommitted.diff"

    # --- logs

    @property
    def log_dir(self) -> Path:
        return self.path / "log"

    @property
    def job_log(self) -> Path:
        """Standard output and error of the job."""
        return self.log_dir / "job.txt"

    @property
    def diagnostics_file(self) -> Path:
        return self.log_dir / "diagnostics.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.log_dir / f"rank-{rank:05d}.txt"

    def memory_file(self, rank: int) -> Path:
        """The allocator's summary at the time a rank ran out of memory."""
        return self.log_dir / f"memory-{rank:05d}.txt"

    def device_log(self, host: str) -> Path:
        """Output of the process that samples the devices of a node."""
        return self.log_dir / f"devices-{host}.txt"

    def sink_log(self, name: str, rank: int = 0) -> Path:
        """Output of the process that feeds a sink."""
        return self.log_dir / f"sink-{name}{_rank_suffix(rank)}.txt"

    def quarantine_file(self, rank: int) -> Path:
        """Samples that a rank could not use, as JSON lines."""
        return self.log_dir / f"quarantine-{rank:05d}.jsonl"

    # --- results

    @property
    def metrics_dir(self) -> Path:
        return self.path / "metrics"

    def metrics_file(self, rank: int) -> Path:
        return self.metrics_dir / f"rank-{rank:05d}.jsonl"

    def sink_offset_file(self, name: str, rank: int = 0) -> Path:
        """How many bytes of the metrics file a sink has received."""
        return self.metrics_dir / f"sink-{name}{_rank_suffix(rank)}.offset"

    def sink_media_file(self, name: str, rank: int = 0) -> Path:
        """How many bytes of each rank's media index a sink has received."""
        return self.metrics_dir / f"sink-{name}{_rank_suffix(rank)}.media"

    def sink_file(self, name: str) -> Path:
        """The class and settings of a sink: enough to feed it again."""
        return self.metrics_dir / f"sink-{name}.json"

    @property
    def csv_file(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.jsonl"

    def events_file(self, rank: int) -> Path:
        """Events: rank 0 records those of the run, other ranks only their warnings."""
        return self.log_dir / f"events-{rank:05d}.jsonl" if rank else self.path / "events.jsonl"

    @property
    def nodes_dir(self) -> Path:
        return self.path / "nodes"

    def node_file(self, host: str) -> Path:
        """Samples of the devices of a node, as JSON lines."""
        return self.nodes_dir / f"{host}.jsonl"

    @property
    def alerts_dir(self) -> Path:
        """Which alerts were sent, and by which process."""
        return self.path / "alerts"

    def alert_file(self, key: str) -> Path:
        return self.alerts_dir / f"{key}.json"

    @property
    def traces_dir(self) -> Path:
        return self.path / "traces"

    def trace_file(self, first: int, last: int, rank: int, ending: str = ".json.gz") -> Path:
        """The trace of some steps of a rank, or a file that belongs to it."""
        return self.traces_dir / f"step-{first:012d}-{last:012d}-rank-{rank:05d}{ending}"

    @property
    def media_dir(self) -> Path:
        return self.path / "media"

    def media_index_file(self, rank: int) -> Path:
        """The index of a rank's images, figures, histograms and texts, a row each."""
        return self.media_dir / f"rank-{rank:05d}.jsonl"

    def media_files_dir(self, rank: int) -> Path:
        """The files that the index of a rank names."""
        return self.media_dir / f"rank-{rank:05d}"

    @property
    def eval_dir(self) -> Path:
        return self.path / "eval"

    def eval_file(self, name: str) -> Path:
        """Results of the evaluations of that name, a row each."""
        return self.eval_dir / f"{name}.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / step_name(step)


RELATIVE = RunPaths(path=Path())
"""the paths of any run, relative to its directory"""
