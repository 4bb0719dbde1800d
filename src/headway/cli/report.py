"""`headway report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from headway.cli.parser import Parser, above_zero
from headway.cli.screen import console
from headway.errors import DONE, UsageError
from headway.watch.report import PARTS, TimeAccount, account_run, write_report
from headway.watch.runs import newest_run, resolve

_BAR_CELLS = 20
_EXAMPLES = """\
examples:
  headway report                            reports the newest run in runs/
  headway report x7k2                       writes report.html into the run directory
  headway report x7k2 --price 2.50          with the cost, at this price per GPU-hour
  headway report x7k2 --times               also prints where the time went
  headway report x7k2 -o digits.html

The report has curves, where the time went (goodput), attempts, ranks, messages, settings, code and environment, in one
file without scripts or external resources. A run of a minute or more that succeeds writes its report itself.
"""


def main(argv: list[str]) -> int:
    parser = Parser("report", "Writes a run as one self-contained HTML file, to keep or to mail.", _EXAMPLES)
    parser.add_run(nargs="?", more="; the newest by default")
    parser.add_argument("-o", "--output", metavar="FILE", help="write this file instead")
    parser.add_argument(
        "--price", type=above_zero, metavar="X", help="what a GPU-hour costs, in your currency"
    )
    parser.add_argument("--times", action="store_true", help="also print where the time went")
    options = parser.parse_args(argv)
    runs = resolve([options.run], options.root) if options.run is not None else newest_run(options.root)
    if options.output and len(runs) > 1:
        raise UsageError(
            f"{options.run!r} is a sweep of {len(runs)} runs: leave --output out, or name one run"
        )
    if options.output and not (parent := Path(options.output).absolute().parent).is_dir():
        raise UsageError(f"--output {options.output}: there is no directory {parent}")
    for run in runs:
        if options.times:
            console().print(time_table(account_run(run)))
        print(write_report(run, Path(options.output) if options.output else None, price=options.price))
    return DONE


def time_table(times: TimeAccount) -> Table:
    """Returns where the time of a run went, as a table with a bar for each part."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column()  # what a narrow terminal wraps
    for name, seconds in times.parts.items():
        if seconds > 0 and times.total_s > 0:
            share = seconds / times.total_s
            bar = Text("█" * round(_BAR_CELLS * share), "cyan")
            table.add_row(
                Text(name, "bold"), f"{seconds:.1f} s", f"{share:.0%}", bar, Text(PARTS[name], "dim")
            )
    repeated = f", {times.repeated}" if times.repeated.count else ""
    table.add_row("total", f"{times.total_s:.1f} s", "", "", Text(f"of all attempts{repeated}", "dim"))
    return table
