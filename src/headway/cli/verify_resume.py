"""`headway verify-resume`: kills a script, resumes it, and compares the two trainings."""

from __future__ import annotations

from headway.cli.parser import Parser, above_zero, positive
from headway.cli.screen import print_json
from headway.errors import DONE
from headway.system.log import logger

_EXAMPLES = """\
examples:
  headway verify-resume train.py --epochs 2                       one rank; options after the script are its own
  headway verify-resume --nproc 2 --other-nproc 1 train.py        also resumed on another number of ranks
  headway verify-resume --quick train.py                          one kill
  headway verify-resume --json train.py > verdicts.json

The script must save, with pipe.enable_checkpointing() or in its own loop with hw.train.Ledger. It is started ten times,
and eight times more for --other-nproc: make the training short, or kill once with --quick.
Exit codes: 0 all equal; 1 something differs, or the script failed; 2 bad usage.
"""


def main(argv: list[str]) -> int:
    does = "Runs a script, kills it at four points, resumes it, and compares every step to the last bit."
    parser = Parser("verify-resume", does, _EXAMPLES)
    parser.add_argument(
        "--nproc", type=positive, default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.add_argument(
        "--other-nproc", type=positive, metavar="N", help="also resume on this number of processes"
    )
    parser.add_argument(
        "--at",
        action="append",
        metavar="POINT",
        help="first-epoch, boundary, last-epoch or end (default: all that the training has)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="kill once, in the middle of the last epoch (4 starts instead of 10)",
    )
    parser.add_argument(
        "--tolerance",
        type=above_zero,
        metavar="R",
        help="by which part losses and weights may differ on another number of ranks (default: 0.01; if training draws "
        "random numbers, they are not compared)",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the runs there (default: a temporary directory)")
    parser.add_argument(
        "--timeout", type=above_zero, default=3600.0, metavar="S", help="seconds for one start of the script"
    )
    parser.add_json()
    parser.add_script(module=False)
    options = parser.parse_args(argv)

    from headway.testing.verify import verify_resume  # late: it is not needed for --help

    report = verify_resume(
        options.script,
        options.args,
        nproc=options.nproc,
        other_nproc=options.other_nproc,
        at=options.at,
        quick=options.quick,
        tolerance=options.tolerance,
        keep=options.keep,
        timeout=options.timeout,
        progress=logger.info,
    )
    if options.json:
        print_json(report.to_dict())
    else:
        print(report.table())
    return DONE if report.ok else 1
