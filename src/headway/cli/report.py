"""`headway report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

from headway.cli.parser import Parser, above_zero
from headway.errors import DONE, UsageError
from headway.watch.report import write_report
from headway.watch.runs import resolve

_EXAMPLES = """\
examples:
  headway report x7k2                       writes report.html into the run directory
  headway report x7k2 --price 2.50          with what a GPU-hour costs
  headway report x7k2 -o digits.html

Curves, where the time went (goodput), attempts, ranks, messages, settings, code and environment, in one file without
scripts or outside resources. A run of a minute or more that ends well writes it by itself.
"""


def main(argv: list[str]) -> int:
    parser = Parser("report", "Writes a run as one self-contained HTML file, to keep or to mail.", _EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="run directory, id, or beginning or end of an id")
    parser.add_argument("-o", "--output", metavar="FILE", help="write this file instead")
    parser.add_argument(
        "--price", type=above_zero, metavar="X", help="what a GPU-hour costs, in your currency"
    )
    parser.add_root()
    options = parser.parse_args(argv)
    runs = resolve([options.run], options.root)
    if options.output and len(runs) > 1:
        raise UsageError(
            f"{options.run!r} is a sweep of {len(runs)} runs: leave --output out, or name one run"
        )
    for run in runs:
        print(write_report(run, Path(options.output) if options.output else None, price=options.price))
    return DONE
