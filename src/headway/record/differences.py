"""What differs between an attempt that begins and the one before: code, software, devices, ranks and settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from headway.errors import HeadwayError
from headway.record import sources
from headway.record.diagnostics import Facts
from headway.run import Run, config_text
from headway.run.arguments import split_command
from headway.run.settings import find_differences, parse
from headway.system import jsonlines
from headway.system.redact import redact_argv
from headway.system.text import plural, shorten_list

_MAX_NAMED = 5


def record_differences(run: Run, attempt: int, facts: Facts, config: object) -> list[str]:
    """Returns a line for each kind of difference from the attempt before; records the code, the command and settings.

    `facts` are the diagnostics of this attempt, which are not written yet. The attempt before the first one of a run
    that began with a checkpoint of another is the last one of that run. Without one, nothing differs.
    """
    code, other = sources.collect(), run if attempt > 1 else _parent(run)
    lines = [] if other is None else [*_compare_code(run, other, code), *_compare_machines(other, facts)]
    kept = sources.recorded(run)
    if code and (not kept or kept[-1][1] != code):
        sources.write(run, attempt, code)
    if attempt > 1:
        lines += _update_settings(run, config)
        _update_command(run)
    return lines


def _parent(run: Run) -> Run | None:
    checkpoint = run.parent_checkpoint()
    with suppress(HeadwayError):  # it may be gone
        return None if checkpoint is None else Run.open(checkpoint.parent.parent)
    return None


def _compare_code(run: Run, other: Run, code: sources.Sources) -> Iterator[str]:
    kept = sources.recorded(other)
    words = sources.summarize(kept[-1][1], code) if kept and code else []
    if words:
        verb = f"headway compare {run.shell_name}" + ("" if other == run else f" {other.shell_name}")
        yield f"{shorten_list(words, _MAX_NAMED)}; {verb} --code shows them"


def _compare_machines(other: Run, facts: Facts) -> Iterator[str]:
    """Yields a line on versions, devices and the number of ranks."""
    before = (
        next(iter(jsonlines.read_reversed(other.diagnostics_file)), None) if other.log_dir.is_dir() else None
    )
    if before is None:
        return
    old, new = _machine(before), _machine(facts)
    found = [
        f"{name} {new[name]} instead of {old[name]}" for name in new if old.get(name) not in (None, new[name])
    ]
    ranks = [(each.get("world") or {}).get("world_size") for each in (before, facts)]
    if ranks[0] and ranks[1] and ranks[0] != ranks[1]:
        found.append(f"{plural(ranks[1], 'rank')} instead of {ranks[0]}")
    if found:
        yield shorten_list(found, _MAX_NAMED)


def _machine(facts: Facts) -> dict[str, Any]:
    """Returns versions by name, and the device; those that are not known are left out."""
    torch, driver = facts.get("torch") or {}, facts.get("driver") or {}
    found = {"python": (facts.get("python") or {}).get("version"), **(facts.get("packages") or {})}
    found |= {"torch": torch.get("version"), "CUDA": torch.get("cuda"), "ROCm": torch.get("hip")}
    found |= {"driver": driver.get("version"), "device": facts.get("device")}
    return {name: value for name, value in found.items() if value is not None}


def _update_settings(run: Run, config: object) -> list[str]:
    """Records the settings of this attempt, and returns a line if they are others."""
    if config is None or (before := parse(run.info().get("config") or "")) is None:
        return []
    text = config_text(config)
    found = [f"{name} {old} -> {new}" for name, old, new in find_differences(before, parse(text))]
    if found:
        run.set_config(config)
    return [f"config: {shorten_list(found, _MAX_NAMED)}"] if found else []


def _update_command(run: Run) -> None:
    """Records the arguments of this attempt, with which `headway resume` starts the next one."""
    command = run.info()["command"]
    arguments = split_command(redact_argv(sys.orig_argv))[1]
    is_pinned = bool(run.info()["code"].get("snapshot"))  # such a command begins with the script
    start, before = (command[:1], command[1:]) if is_pinned else split_command(command)
    if before != arguments:
        run.set_command([*start, *arguments])
