"""The runs of a name that were not resumed when a new run begins, and why: those that came closest are named first."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import final

from headway import schedulers
from headway.run.arguments import find_changes, find_named, split_command
from headway.run.directory import Run
from headway.run.lock import Owner, newest_owner
from headway.run.settings import RunSettings, find_differences, parse
from headway.system import environment
from headway.system.redact import redact_argv
from headway.system.text import shorten_list

MAX_NAMED = 5
_MAX_SETTINGS = 3
"""settings in a line"""
_MAX_CHARACTERS = 40
"""of a value in a line"""


class Closeness(IntEnum):
    """How close a run came to being resumed; the closest are named first. The description counts those not named."""

    IN_USE = 0
    OPEN = 1
    FAILED_AT_A_PROMPT = 2
    UNSTARTED = 3
    OTHER_SETTINGS = 4
    FORK = 5
    FINISHED = 6
    FINISHED_WITH_OTHER_SETTINGS = 7

    @property
    def description(self) -> str:
        return self.name.lower().replace("_", " ")


@final
@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A run that was not resumed, and why."""

    run: Run
    closeness: Closeness
    why: str
    remedy: str = ""
    """how to resume it all the same"""

    @property
    def reason(self) -> str:
        return f"{self.run.id}: {self.why}"


def is_at_prompt() -> bool:
    """Returns whether this process is a notebook or a prompt: the same call may follow in it."""
    return hasattr(sys, "ps1")


def failed_at_prompt(run: Run) -> bool:
    """Returns whether a cell or a line of a prompt has failed in this run: what follows it is probably another try."""
    attempts = run.info()["attempts"]
    return is_at_prompt() and bool(attempts) and attempts[-1]["status"] == "failed"


def examine(run: Run, settings: RunSettings, parent: Path | None) -> PassedOver:
    """Returns why a run of this user is not resumed with these settings."""
    info = run.info()
    attempts, recorded = info["attempts"], info.get("config") or ""
    finished = bool(attempts) and attempts[-1]["status"] == "done"
    same = settings.match(recorded)
    if finished:
        kind = Closeness.FINISHED if same else Closeness.FINISHED_WITH_OTHER_SETTINGS
        why = "finished" if same else f"finished, with {_differing(recorded, settings)}"
        return PassedOver(run=run, closeness=kind, why=why)
    if owner := _living_owner(run):
        why = f"in use by {owner}" + ("" if same else f", with {_differing(recorded, settings)}")
        return PassedOver(run=run, closeness=Closeness.IN_USE, why=why)
    if not same:
        why = _differing(recorded, settings)
        return PassedOver(
            run=run, closeness=Closeness.OTHER_SETTINGS, why=why, remedy=resume_with_settings(run)
        )
    if run.parent_checkpoint() != parent:
        why = f"it began with another checkpoint, {run.parent_checkpoint() or 'none'}"
        return PassedOver(run=run, closeness=Closeness.FORK, why=why, remedy=resume_call(run))
    if not attempts:
        return PassedOver(run=run, closeness=Closeness.UNSTARTED, why="it was never started")
    if failed_at_prompt(run):
        why = f"failed: {attempts[-1].get('why', 'its cause was not recorded'):.200}"
        return PassedOver(run=run, closeness=Closeness.FAILED_AT_A_PROMPT, why=why, remedy=resume_call(run))
    return PassedOver(run=run, closeness=Closeness.OPEN, why="another process held it at this moment")


def describe(found: Sequence[PassedOver]) -> str:
    """Returns a line for each of the runs that came closest, with one way to resume each, and a count of the others."""
    ordered = sorted(found, key=lambda each: each.closeness)  # within each kind, the newest first
    lines = [
        each.reason + (f"; to resume it: {each.remedy}" if each.remedy else "")
        for each in ordered[:MAX_NAMED]
    ]
    if len(lines) == 1:
        return f"a new run begins, since this one is not resumed: {lines[0]}"
    if rest := Counter(each.closeness.description for each in ordered[MAX_NAMED:]):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in rest.items())
        lines.append(f"and {rest.total():,} more: {counts}")
    return "\n  ".join(["a new run begins, since these are not resumed:", *lines])


def resume_call(run: Run) -> str:
    """Returns what resumes a run: a command or, in a notebook, a call."""
    if is_at_prompt():
        return f"pipe.enable_checkpointing(resume={str(run.path)!r})"
    return f"headway resume {run.shell_name}"


def resume_with_settings(run: Run, names: Collection[str] = ()) -> str:
    """Returns what resumes a run with the settings of this process, which differ from those of the run.

    If the command line sets all that `names` has, only these are named.
    """
    if is_at_prompt():
        return f"{resume_call(run)} with {environment.APPLY}=1" if names else resume_call(run)
    info, now = run.info(), split_command(redact_argv(sys.orig_argv))[1]
    if names and (named := find_named(now, names)):
        return f"{resume_call(run)} -- {shlex.join(named)}"
    # a submitted command begins with the script
    begun = info["command"][1:] if info["code"].get("snapshot") else split_command(info["command"])[1]
    if begun == now:
        return f"{resume_call(run)} --apply"
    new = find_changes(begun, now)
    if new is None:
        return f"the same command with {environment.RUN}={run.shell_path} {environment.APPLY}=1"
    return f"{resume_call(run)} -- {shlex.join(new)}"


def _differing(recorded: str, settings: RunSettings) -> str:
    """Returns the settings in which a run differs from this process."""
    before = parse(recorded)
    if before is None:
        return "settings that cannot be read"
    found = [
        f"{name} {_short(old)} -> {_short(new)}"
        for name, old, new in find_differences(before, settings.tree)
        if not settings.is_free(name)
    ]
    return f"other settings: {shorten_list(found, _MAX_SETTINGS)}"


def _short(value: object) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


def _living_owner(run: Run) -> Owner | None:
    """Returns the process that trains in a run, as far as this machine and the scheduler know."""
    owner = newest_owner(run.lock_dir)
    if owner is None or owner.released or owner.identity.is_alive() is False:
        return None
    return None if schedulers.is_gone(owner.job, schedulers.detect()) else owner
