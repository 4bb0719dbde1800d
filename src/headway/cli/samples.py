"""`headway runs samples`: which samples were in a step?"""

from __future__ import annotations

import argparse
import json

from headway.errors import DONE
from headway.launcher.sampling import samples_of
from headway.run import Run

_EXAMPLES = """\
examples:
  headway runs samples runs/digits-2026.11.15-14.30-x7k2 --step 37
  headway runs samples runs/digits-2026.11.15-14.30-x7k2 --step 37 --json

The run must have been started with HEADWAY_LEDGER=1, or with pipe.enable_ledger().
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headway runs samples",
        description="Which samples were in a step: those of all ranks, in the order of the global batch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1")
    parser.add_argument("--json", action="store_true", help="print facts for programs")
    options = parser.parse_args(argv)
    found = samples_of(Run.open(options.run), options.step)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(found.row.words())
        print("\n".join(found.samples))
    return DONE
