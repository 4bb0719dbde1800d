"""`headway runs samples`: lists the samples of a step."""

from __future__ import annotations

from headway.cli.parser import Parser, positive
from headway.cli.screen import print_json, safe
from headway.errors import DONE
from headway.watch.runs import resolve
from headway.watch.samples import samples_of

_EXAMPLES = """\
examples:
  headway runs samples runs/digits-2026.11.15-14.30-x7k2 --step 37
  headway runs samples x7k2 --step 37 --json                           by the end of its id

The run must have been started with HEADWAY_LEDGER=1, or with pipe.enable_ledger().
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "runs samples",
        "Lists the samples of a step: of all ranks, in the order of the global batch.",
        _EXAMPLES,
    )
    parser.add_run()
    parser.add_argument("--step", type=positive, required=True, metavar="N", help="counted from 1")
    parser.add_json()
    options = parser.parse_args(argv)
    run, *_ = resolve([options.run], options.root)  # the first run of a sweep stands for all of them
    found = samples_of(run, options.step)
    if options.json:
        print_json(found.to_dict())
    else:
        print(safe(found.row.describe()))
        print("\n".join(map(safe, found.samples)))
    return DONE
