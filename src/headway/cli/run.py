"""`headway run`: run a script here, on N processes that live and die together."""

from __future__ import annotations

import argparse

from headway.launcher.agent import Agent
from headway.launcher.program import python_command

_EXAMPLES = """\
examples:
  headway run train.py                       one process
  headway run --nproc 4 train.py --lr 3e-4   four; what follows the script belongs to it
  headway run --nproc 2 -m mypackage.train   a module

Exit codes: 0 all ranks ended well; 1 a rank failed (the last lines say which and why); 2 bad usage;
75 stopped with a checkpoint; 130 Ctrl-C.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headway run",
        description="Runs a script here, on N processes that live and die together.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="number of processes (default: 1)")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again after a crash, at most N times, if there is a newer checkpoint each time (default: 0)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT names a module, as for python -m"
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed on to the script")
    options = parser.parse_args(argv)
    command = python_command(options.script, options.args, module=options.module)
    return Agent(command, processes=options.nproc, max_restarts=options.max_restarts).run()
