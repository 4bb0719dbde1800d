"""`headway submit`: submits a SLURM job that runs the code as it is now."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from headway import schedulers
from headway.cli.parser import Parser
from headway.cli.screen import print_json
from headway.cli.target_options import add_target, read_options
from headway.errors import DONE, UsageError
from headway.launcher import submit_script
from headway.launcher.code import snapshot
from headway.launcher.job import Job
from headway.launcher.submit_script import Script, SubmittedJob

_EXAMPLES = """\
examples:
  headway submit --nodes 2 --gpus-per-node 8 --time 2:00:00 train.py --lr 3e-4
  headway submit --on cluster.yaml --array lr=1e-3,3e-4 seed=1,2,3 train.py
  headway submit --dry-run --nodes 2 train.py       show the job script, submit nothing
  headway submit --nodes 8 --doctor train.py        examine the nodes first, and exit with 1 if they are not fit
  headway submit --nodes 1-4 train.py               as many nodes as are free, at least one
  headway submit --extra mail-type=END --setup 'module load cuda' --env WANDB_MODE=offline train.py

The job runs a copy of the code as it is now, in a new run directory, so you can keep editing. When it is preempted, or
its time is up, it saves and queues itself again.

Exit codes: 0 submitted; 1 it may be in the queue, but SLURM's answer was lost; 2 refused, by headway or SLURM; with
--watch, the exit code of the job, or of the first failed run of an array.
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_sweep(argv)
    if options.json and options.watch:
        raise UsageError("--json and --watch do not go together: the output of a job is not JSON")
    if options.json and options.dry_run:
        raise UsageError("--json and --dry-run do not go together: a job script is not JSON")
    target = read_options(options)
    script = Script(name=options.script, args=options.args, module=options.module)
    root = Path(options.root)
    if options.dry_run:
        print(submit_script.dry_run(script, target, root=root, name=options.name), end="")
        return 0
    done = submit_script.submit(script, target, root=root, name=options.name, dirty=options.dirty)
    if options.json:
        print_json(done.to_dict())
    else:
        _show(done)
    if not options.watch:
        return DONE
    codes = [Job(run).follow(sys.stdout) for run in done.runs]
    return next(filter(None, codes), DONE)


def _parser() -> Parser:
    parser = Parser("submit", "Submits a script as a SLURM job, with the code as it is now.", _EXAMPLES)
    parser.add_argument("--name", help="name of the run (default: the script's)")
    parser.add_argument(
        "--root", default="runs", metavar="DIR", help="where run directories are made (default: runs)"
    )
    parser.add_argument("--dirty", choices=("snapshot", "refuse", "live"), default="snapshot",
                        help="what to do about uncommitted changes: copy them, refuse, or run the files in place "
                        "(default: snapshot)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="show the job script; submit nothing")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the job's output until it ends; for an array, of one run after the other",
    )
    parser.add_json()
    add_target(parser)
    parser.add_script()
    return parser


def _show(done: SubmittedJob) -> None:
    first = done.runs[0]
    for note in done.notes:
        print(f"  {note}")
    if len(done.runs) == 1:
        print(f"job {done.ids.job_id} in {first.path}")
    else:
        print(f"job {done.ids.job_id}, an array of {len(done.runs)}:")
        for run in done.runs:
            print(f"  {run.path}")
    commands = schedulers.load(done.ids.scheduler).commands(done.ids)
    print(
        f"\n  {commands['look']}        is it waiting or running?\n  tail -F {shlex.quote(str(first.job_log))}"
    )
    print(f"  {commands['cancel']}              end it; it saves first")
    if snapshot.load(first).start.is_relative_to(first.work_dir):
        print(f"  {shlex.quote(str(first.work_dir))}        has what it writes by relative paths")
