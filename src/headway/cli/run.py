"""`headway run`: runs a script here, on N processes that start and end together."""

from __future__ import annotations

from headway.cli.parser import Parser, natural, positive
from headway.errors import UsageError
from headway.launcher.agent.agent import Agent, check_nproc
from headway.launcher.local_runs import run_smoke, run_sweep
from headway.launcher.program import python_command
from headway.launcher.submit_script import Script

_EXAMPLES = """\
examples:
  headway run train.py                       one process
  headway run --nproc 4 train.py --lr 3e-4   four; options after the script are its own
  headway run --nproc 2 -m mypackage.train   a module
  headway run --smoke --nproc 2 train.py     two steps, a validation, a save, a step after resuming
  headway run --array lr=1e-3,3e-4 seed=1,2 train.py             four runs, one after the other

Exit codes: 0 all ranks succeeded; 1 a rank failed (the last lines say which and why); 2 bad usage;
74 the storage failed; 75 stopped with a checkpoint; 86 no checkpoint is valid; 93 three attempts made no new step;
130 Ctrl-C; 143 SIGTERM without a save. With one process, 1 is replaced by the script's own code.
"""


def main(argv: list[str]) -> int:
    parser = Parser("run", "Runs a script here, on N processes that start and end together.", _EXAMPLES)
    parser.add_argument(
        "--nproc", type=positive, default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.add_argument(
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="start again after a crash, at most N times, if there is a newer checkpoint each time (default: 0)",
    )
    parser.add_argument(
        "--array",
        action="append",
        metavar="NAME=V1,V2",
        help="run once for each combination of values, one after the other; or a file of settings (.yaml, .json, .csv)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="test everything once: two steps, a validation, a save, and a step after resuming; nothing is kept",
    )
    parser.add_script()
    options = parser.parse_sweep(argv)
    if options.array and options.max_restarts:
        raise UsageError("--array and --max-restarts cannot be combined: restart the runs that failed")
    if options.smoke and (options.array or options.max_restarts):
        raise UsageError("--smoke tries one run once: leave --array and --max-restarts out")
    if options.array:
        script = Script(name=options.script, args=options.args, module=options.module)
        return run_sweep(script, options.array, nproc=options.nproc)
    command = python_command(options.script, options.args, module=options.module)
    check_nproc(options.nproc)
    if options.smoke:
        return run_smoke(command, nproc=options.nproc)
    return Agent(command, nproc=options.nproc, max_restarts=options.max_restarts).run()
