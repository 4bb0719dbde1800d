"""`headway compare`: shows runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headway.cli.parser import Parser
from headway.cli.screen import console, number, print_json, safe
from headway.errors import DONE, UsageError
from headway.run import Run
from headway.system.text import format_duration, shorten_list
from headway.testing.verify import compare_runs
from headway.watch.comparison import (
    CodeComparison,
    Metric,
    RunComparison,
    compare,
    compare_attempts,
    compare_code,
)
from headway.watch.runs import resolve

_EXAMPLES = """\
examples:
  headway compare runs/digits-2026.11.15-14.30-x7k2 runs/digits-2026.11.15-15.02-m3p9
  headway compare x7k2 m3p9                     the end of an id will do
  headway compare lr-2026.11.15-16.00-a2b4      a sweep: the id of its first run stands for all runs
  headway compare a2b4 c5d6                     two runs of a sweep: each stands for itself
  headway compare x7k2 m3p9 --metric max:val/f1 --metric train/loss
  headway compare x7k2 m3p9 --code              how their code differs
  headway compare x7k2 --code                   how the code of one run was changed before it was resumed
  headway compare x7k2 m3p9 --exact             are they equal to the last bit? (needs a ledger: HEADWAY_LEDGER=1)

Shows the settings in which the runs differ, state, steps, time, and the last and the best value of up to four metrics
(the lowest for names like loss or error, the highest for names like accuracy; --metric chooses others, with min: and
max:).
Exit codes: 0; with --exact 1 if they differ; 2 bad usage.
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "compare", "Shows runs side by side: settings that differ, state, and metrics.", _EXAMPLES
    )
    parser.add_run("runs", nargs="+")
    parser.add_argument(
        "--metric", metavar="NAME", action="append", default=[], help="show this metric; repeatable"
    )
    parser.add_argument(
        "--code", action="store_true", help="show how the code of two runs differs, or of attempts of one"
    )
    parser.add_argument(
        "--exact", action="store_true", help="compare each step of two runs bit for bit, by their ledgers"
    )
    parser.add_json()
    options = parser.parse_args(argv)
    runs = resolve(options.runs, options.root)
    if options.exact and len(runs) != 2:
        raise UsageError(f"--exact compares two runs, and these are {len(runs)}: name two")
    if options.code and len(runs) > 2:
        raise UsageError(f"--code compares two runs, or the attempts of one, and these are {len(runs)}")
    if options.exact:
        return _compare_steps(*runs, as_json=options.json)
    if options.code:
        found = compare_attempts(*runs) if len(runs) == 1 else compare_code(*runs)
        return _show_code(found, as_json=options.json)
    compared = compare(runs, metrics=options.metric)
    if options.json:
        print_json([run.to_dict() for run in compared])
    else:
        _show(compared, console())
    return DONE


def _show_code(found: CodeComparison, *, as_json: bool) -> int:
    if as_json:
        print_json({"same": found.same, "diff": found.diff, "not_compared": found.not_compared})
        return DONE
    same = ["the same commit and uncommitted changes"] if found.is_whole and not found.diff else []
    print("\n".join(map(safe, [*same, *found.diff, *found.not_compared])))
    return DONE


def _compare_steps(one: Run, other: Run, *, as_json: bool) -> int:
    same, words = compare_runs(one, other)
    if as_json:
        print_json({"same": same, "compared" if same else "differs": words})
    else:
        told = f"the same to the last bit: {words}" if same else f"they differ: {words}"
        print("\n".join(map(safe, told.splitlines())))
    return DONE if same else 1


def _show(compared: Sequence[RunComparison], screen: Console) -> None:
    """Prints a row per run; for up to three runs, a column per run."""
    settings = list(dict.fromkeys(name for run in compared for name in run.settings))
    metrics = list(compared[0].metrics)
    code = ["code"] if any(run.code for run in compared) else []
    curves = [f"{name} curve" for name in metrics] if len(compared) <= 3 else []
    heads = ["run", *code, *settings, "state", "step", "time", *metrics, *curves]
    lines = [
        [
            _name(run, compared),
            *([run.code] if code else []),
            *(_shortened(str(run.settings.get(name, "-"))) for name in settings),
            run.summary.status.state,
            number(run.summary.step),
            format_duration(run.summary.seconds),
            *(_metric(run.metrics[name]) for name in metrics),
            *(run.metrics[name].curve for name in (metrics if curves else [])),
        ]
        for run in compared
    ]
    upright = len(compared) <= 3
    rows = [[safe(cell) for cell in row] for row in (heads, *lines)]  # names and settings come from files
    grid = list(zip(*rows, strict=True)) if upright else rows
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    hidden = 0
    while not upright and hidden < len(metrics) and sum(widths) + 2 * len(widths) > screen.width:
        widths.pop()
        hidden += 1
    for index, cells in enumerate(grid):
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()
        screen.print(Text(text, "" if index else "bold"), soft_wrap=True)
    narrow = f"; not shown for lack of width: {', '.join(map(safe, metrics[-hidden:]))}" if hidden else ""
    if others := compared[0].left_out:
        narrow += f"; more with --metric NAME: {safe(shorten_list(others))}"
    if metrics or narrow:
        screen.print(Text(f"metrics: last, best @ its step{narrow}", "dim"), soft_wrap=True)


def _name(run: RunComparison, among: Sequence[RunComparison]) -> str:
    """Returns the id of a run, or its end if that is unique; verbs accept both."""
    if len(among) <= 3:
        return run.summary.run.id
    short = [each.summary.run.id[-4:] for each in among]
    return run.summary.run.id[-4:] if len(set(short)) == len(short) else run.summary.run.id


def _metric(metric: Metric) -> str:
    best = "" if metric.best is None else f", {number(metric.best)} @ {metric.best_step}"
    return number(metric.last) + best


def _shortened(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:29]}…"
