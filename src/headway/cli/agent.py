"""`headway agent`: the part of a job that runs on each node, started by srun or mpirun."""

from __future__ import annotations

from headway.cli.parser import Parser, natural, positive
from headway.launcher.agent import node
from headway.launcher.program import python_command

_EXAMPLES = """\
examples:
  srun --nodes=2 --ntasks-per-node=1 headway agent --nproc 8 train.py    eight ranks on each of two nodes
  mpirun -n 4 headway agent train.py                                     four ranks
  headway agent --run runs/digits-2026.11.15-14.30-x7k2                  a run that `headway submit` has prepared

Agents find each other through the variables of srun or mpirun and a directory that all of them can write: the run
directory, or $HEADWAY_RUNS (default: runs). Exit codes are those of `headway run`.
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "agent",
        "Starts the ranks of this node; the ranks of all nodes start and end together.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--nproc", type=positive, default=1, metavar="N", help="ranks of this agent (default: 1)"
    )
    parser.add_argument(
        "--max-restarts", type=natural, default=0, metavar="N", help="as for `headway run` (default: 0)"
    )
    parser.add_argument("--run", metavar="DIR", help="run what was submitted into this run directory")
    parser.add_script(needed=False)
    options = parser.parse_args(argv)
    if (options.run is None) == (options.script is None):
        parser.error("give a script, or --run DIR")
    if options.run is not None:
        return node.run_submitted(options.run)
    command = python_command(options.script, options.args, module=options.module)
    return node.run_here(command, nproc=options.nproc, max_restarts=options.max_restarts)
