"""`headway checkpoint`: shows, verifies and exports checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from headway.cli.parser import Positional, above_zero, dispatch, parse
from headway.cli.screen import EscapingConsole, console, number, plain_table, print_json, safe
from headway.errors import DONE, NoValidCheckpoint, UsageError
from headway.run import find_runs
from headway.system.text import format_bytes, shorten_list

if TYPE_CHECKING:
    from headway.checkpoint.inspect.listing import CheckpointSummary
    from headway.checkpoint.inspect.tables import Overview

_MOST_ROWS = 1000

_USAGE = """\
usage: headway checkpoint show PATH | verify PATH | export PATH OUT.safetensors

  headway checkpoint show runs/digits-...           all checkpoints, with the newest and the best marked, and the
                                                    tensors of the newest by module: shapes, types, bytes, totals
  headway checkpoint show model.safetensors         the same for a plain file; also for model.pt and for a directory of
                                                    torch's distributed checkpointing: nothing in them is executed
  headway checkpoint verify runs/digits-...         read every byte of every checkpoint and compare checksums
  headway checkpoint export PATH net.safetensors --part models.net    plain weights, saved by any number of ranks
  headway checkpoint export PATH adapter --adapter lm   the LoRA adapter of a model, as a directory that peft reads

PATH is a checkpoint (step-000000001000), a run (its directory, its id, or the beginning or end of its id), or a
directory of checkpoints, of which show and export take the newest. `headway checkpoint VERB --help` explains a verb.

Exit codes: 0 intact, 2 bad input, 74 storage failed, 86 damaged.
"""


@dataclass(frozen=True, kw_only=True)
class _CheckpointOptions:
    path: Annotated[Path, Positional("PATH")]
    root: str = "runs"
    """where ids of runs are looked up"""
    json: bool = False
    """print JSON"""

    def place(self) -> Path:
        """Returns the path, or the directory of the run whose id it is, or the beginning or end of whose id."""
        if os.path.lexists(self.path) or not (found := find_runs(str(self.path), self.root)):
            return self.path
        run, *more = found
        if more:
            raise UsageError(
                f"{str(self.path)!r} matches {len(found)} runs in {self.root}; give the path of a run, or more of its "
                "id"
            )
        return run.path


@dataclass(frozen=True, kw_only=True)
class ShowOptions(_CheckpointOptions):
    """Lists tensors by module: shapes, types, bytes, totals; of a run, also all checkpoints. Nothing is loaded."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(_CheckpointOptions):
    """Reads every byte and compares checksums. Exit code 0 if all checkpoints are intact, 86 if not."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(_CheckpointOptions):
    """Exports all tensors, or those of one part, as safetensors: one file, or several with an index if it is large."""

    out: Annotated[Path, Positional("OUT.safetensors")]
    part: str | None = None
    """only this part of the state, like models.net of a Pipeline; names of tensors are written without it"""
    adapter: str | None = None
    """the adapter of this model, such as LoRA, as a directory OUT that peft reads"""
    shard_gb: Annotated[float, above_zero] = 5.0
    """largest size of a file in gigabytes; more becomes OUT-00001-of-0000N.safetensors with an index"""


def main(argv: list[str]) -> int:
    return dispatch("checkpoint", {"show": _show, "verify": _verify, "export": _export}, _USAGE, argv)


def _show(argv: list[str]) -> int:
    from headway.checkpoint.inspect import overview as overviews

    options = parse(ShowOptions, argv, verb="checkpoint show")
    place = options.place()
    listed = overviews.list_all(place)
    overview = overviews.read(place)
    if options.json:
        several = {"checkpoints": [each.to_dict() for each in listed]} if listed else {}
        print_json(overview.to_dict() | several)
        return DONE
    screen = console()
    if listed:
        screen.print(_listing(listed))
        screen.print()
    screen.print(Text(safe(str(overview.path)), style="bold"))
    for name in ("format", "step", "world_size", "created"):
        if overview.about.get(name) is not None:
            screen.print(Text(safe(f"{name}: {overview.about[name]}")))
    if metrics := overview.about.get("metrics"):
        values = ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
        screen.print(Text(safe(f"metrics: {values}")), soft_wrap=True)
    for action in ("import", "call"):
        if names := overview.about.get(f"{action}s"):
            warning = f"loading it with pickle would {action}: {shorten_list(names, limit=20)}"
            screen.print(Text(safe(warning), style="bold red"), soft_wrap=True)
    screen.print(table(overview))
    return DONE


def _listing(listed: list[CheckpointSummary]) -> Table:
    """Returns the checkpoints of a run as a table for a terminal, the newest first."""
    titles = "checkpoint", "", "created", "ranks", "bytes", "metrics"
    made = plain_table(*titles, numbers=("ranks", "bytes"))
    for each in listed:
        marks = ", ".join(word for word in ("newest", "best") if getattr(each, word))
        metrics = ", ".join(f"{name} {number(value)}" for name, value in each.metrics.items())
        made.add_row(
            each.path.name,
            Text(marks, style="bold"),
            safe(each.created[:19]),
            str(each.world_size),
            format_bytes(each.bytes),
            Text(safe(metrics)),
        )
    return made


def table(overview: Overview) -> Table:
    """Returns the overview as a table for a terminal, of limited length: 100,000 rows take a minute to lay out."""
    from headway.checkpoint.inspect.tables import totals

    made = plain_table("tensor", "type", "shape", "elements", "bytes", numbers=("elements", "bytes"))
    shown = 0
    for module, tensors in overview.modules().items():
        if shown >= _MOST_ROWS:
            break
        sum_of = totals(tensors)
        heading = Text(safe(module) or "(no module)", style="bold")
        made.add_row(heading, "", "", f"{sum_of['elements']:,}", format_bytes(sum_of["bytes"]), style="bold")
        for tensor in tensors[: _MOST_ROWS - shown]:
            shown += 1
            name = Text("  " + safe(tensor.name.rpartition(".")[2]))
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            made.add_row(name, tensor.dtype, shape, "", format_bytes(tensor.bytes))
    if left := len(overview.tensors) - shown:
        made.add_row(f"... and {left:,} more: --json lists all", "", "", "", "")
    whole = totals(overview.tensors)
    label = f"{whole['tensors']} tensors"
    made.add_row(label, "", "", f"{whole['elements']:,}", format_bytes(whole["bytes"]), style="bold")
    return made


def _verify(argv: list[str]) -> int:
    from headway.checkpoint import verify
    from headway.checkpoint.inspect import overview as overviews

    options = parse(VerifyOptions, argv, verb="checkpoint verify")
    waiting = EscapingConsole(stderr=True)
    found = {}
    for path in overviews.find(options.place()):
        with waiting.status(f"reading {path.name} ..."):  # shown on a terminal only
            problems = verify(path)
        # by a running training, which keeps the newest
        removed = bool(problems) and not os.path.lexists(path)
        if not removed:
            found[path] = problems
        if not options.json:
            word = "removed" if removed else "damaged" if problems else "whole"
            print(f"{word:7}  {safe(str(path))}")
            for problem in found.get(path, ()):
                print(f"         {safe(problem)}")
    if options.json:
        print_json({str(path): problems for path, problems in found.items()})
    return NoValidCheckpoint.exit_code if any(found.values()) else DONE


def _export(argv: list[str]) -> int:
    options = parse(ExportOptions, argv, verb="checkpoint export")
    if options.part is not None and options.adapter is not None:
        raise UsageError(
            "--part and --adapter are both given: an adapter is a directory of its own, give one of them"
        )
    from headway.checkpoint import export, export_adapter
    from headway.checkpoint.inspect import overview as overviews

    (path, *_) = overviews.find(options.place())
    if options.adapter is not None:
        written = export_adapter(path, options.out, model=options.adapter)
    else:
        written = export(
            path, options.out, part=options.part, shard_bytes=max(1, int(options.shard_gb * 1e9))
        )
    total = sum(file.stat().st_size for file in written)
    if options.json:
        print_json({"source": str(path), "files": [str(file) for file in written], "bytes": total})
    else:
        print("\n".join(safe(str(file)) for file in written))
        print(f"{format_bytes(total)} from {path.name}")
    return DONE
