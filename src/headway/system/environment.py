"""Every HEADWAY_ variable: its name, what it means, and its value with a type.

Users set the first group. headway sets the second for the processes that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headway.errors import UsageError

# --- set by users

RUNS = "HEADWAY_RUNS"
"""directory of run directories; also the rendezvous of ranks that no agent started (default: runs)"""
DATA = "HEADWAY_DATA"
"""directory of datasets"""
WATCHDOG = "HEADWAY_WATCHDOG"
"""seconds without progress after which a run is ended as hanging; 0 disables the check"""
SAMPLE_EVERY = "HEADWAY_SAMPLE_EVERY"
"""seconds between two samples of the devices of a node (default: 15); 0: none"""
LEDGER = "HEADWAY_LEDGER"
"""1: record samples, loss and random state of each step (ledger.jsonl)"""
FAKE_DATA = "HEADWAY_FAKE_DATA"
"""1: repeat each loader's first batch, to see how much a faster loader would help"""
ALERT_URL = "HEADWAY_ALERT_URL"
"""address of a webhook to which alerts are posted; a secret, never written to a file"""
ALERT_COMMAND = "HEADWAY_ALERT_COMMAND"
"""command that gets an alert on its standard input; {subject} in it is replaced by the message"""
PROFILE = "HEADWAY_PROFILE"
"""steps that rank 0 traces, such as 20-25, counted over all stages"""
SAVE_EVERY = "HEADWAY_SAVE_EVERY"
"""how often to save, in place of the script's `every`"""
SAVE_IN_BACKGROUND = "HEADWAY_SAVE_IN_BACKGROUND"
"""0: training waits while a checkpoint is written"""
APPLY = "HEADWAY_APPLY"
"""1: apply the settings of optimizers and schedulers that changed since the run that is resumed began"""
FAILPOINT = "HEADWAY_FAILPOINT"
"""a named point at which a process fails on purpose, for tests"""

# --- set by headway

RUN = "HEADWAY_RUN"
"""the run directory that a job belongs to"""
SMOKE = "HEADWAY_SMOKE"
"""which part of a smoke run this is"""
STAGED = "HEADWAY_STAGED"
"""the directory on this node to which data was staged"""
RENDEZVOUS = "HEADWAY_RENDEZVOUS"
"""file in which ranks find each other; set for every rank that a node agent supervises"""
HEARTBEAT = "HEADWAY_HEARTBEAT"
"""directory in which ranks show their node agent that they make progress"""
SCHEDULER = "HEADWAY_SCHEDULER"
"""the scheduler of the job, as module:Class, if it is not one that ships with headway"""
EARLIER_STARTS = "HEADWAY_EARLIER_STARTS"
"""how often earlier jobs started this run, if jobs cannot be requeued"""
OF_A_JOB = (RUN, SMOKE, STAGED, RENDEZVOUS, HEARTBEAT, EARLIER_STARTS)
"""variables that headway sets in a job, and that a job submitted from there must not inherit"""


def is_on(name: str, environ: Mapping[str, str] = os.environ, *, default: bool = False) -> bool:
    """Returns whether a variable is on (1, true, yes, on) or off (0, false, no, off); `default` if unset or empty.

    >>> is_on(LEDGER, {"HEADWAY_LEDGER": "1"}), is_on(LEDGER, {})
    (True, False)
    """
    text = environ.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    if text:
        raise UsageError(f"{name}={environ[name]!r:.80} is neither on nor off: give 1 or 0")
    return default


def directory(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the path that a variable names; None if it is unset or empty."""
    text = environ.get(name)
    return Path(text).expanduser() if text else None


def runs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of run directories."""
    return directory(RUNS, environ) or Path("runs")


def watchdog_s(default: float, environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds without progress until a run counts as hanging; 0 means never.

    >>> watchdog_s(1800.0, {"HEADWAY_WATCHDOG": "60"})
    60.0
    """
    return _seconds(WATCHDOG, default, environ, example="600, or 0 for no limit")


def sample_every_s(default: float, environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds between two samples of the devices; 0 means none.

    >>> sample_every_s(15.0, {"HEADWAY_SAMPLE_EVERY": "60"})
    60.0
    """
    return _seconds(SAMPLE_EVERY, default, environ, example="15, or 0 for no samples")


def _seconds(name: str, default: float, environ: Mapping[str, str], *, example: str) -> float:
    text = environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{name}={text!r} is not a valid time: give seconds, such as {example}")
    return seconds
