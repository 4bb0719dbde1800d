"""`headway resume`: restarts a run as it was started."""

from __future__ import annotations

import shlex
import sys

from headway.cli.parser import Parser, positive
from headway.cli.screen import safe
from headway.errors import DONE, UsageError
from headway.launcher.job import Job
from headway.launcher.job_start import restart
from headway.launcher.local_runs import local_program, resume_here
from headway.run import Run
from headway.run.choice import script_was_cut
from headway.run.status import Status, check_over
from headway.watch.runs import resolve_one, summary_of

_EXAMPLES = """\
examples:
  headway resume runs/digits-2026.11.15-14.30-x7k2    or the end of its id: headway resume x7k2
  headway resume x7k2 --nodes 4                       a job of SLURM, on another number of nodes
  headway resume x7k2 --nodes 2-4                     as many of them as are free
  headway resume x7k2 --nproc 2                       a run of this machine, on another number of processes
  headway resume x7k2 --dry-run                       show what would be started; start nothing

A job is submitted again with the same settings and code, and its new number is recorded. A run of this machine starts
in the directory where it was started before. A pipeline resumes from its newest checkpoint.

Exit codes: 0 submitted, or the run succeeded; 2 the run is queued, running or done already; else the run's.
"""


def main(argv: list[str]) -> int:
    parser = Parser("resume", "Restarts a stopped or failed run as it was started.", _EXAMPLES)
    parser.add_run()
    parser.add_argument(
        "--nodes", metavar="N", help="number of nodes, or a range such as 1-2, for a job of a scheduler"
    )
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="number of processes, for a run of this machine"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be started; start nothing")
    options = parser.parse_args(argv)
    run = Run.open_private(resolve_one(options.run, options.root).path)
    _check(run, summary_of(run).status)
    if run.job_file.exists():
        if options.nproc:
            raise UsageError(
                f"{run.id} is a job of a scheduler, which starts it: use --nodes instead of --nproc"
            )
        return _submit(run, options.nodes, dry_run=options.dry_run)
    if options.nodes:
        raise UsageError(f"{run.id} was started on this machine: use --nproc instead of --nodes")
    if run.call_dir.is_dir():
        return _call(run, options.nproc, dry_run=options.dry_run)
    program = local_program(run, nproc=options.nproc)
    if options.dry_run:
        print(safe(f"would start on {program.nproc} processes: {shlex.join(program.command)}"))
        return DONE
    return resume_here(run, program)


def _check(run: Run, now: Status) -> None:
    if now.state == "done" and script_was_cut(run) is False:  # the user named this run
        raise UsageError(f"{run.id} is done: there is nothing to resume")
    if now.state != "new":
        check_over(run, now)


def _submit(run: Run, nodes: str | None, *, dry_run: bool) -> int:
    if dry_run:
        print(f"would submit {run.job_script} again" + (f", on {nodes} nodes" if nodes else ""))
        return DONE
    restart(run, nodes=nodes)
    print(f"job {summary_of(run).job} in {run.path}\n\n  tail -F {shlex.quote(str(run.job_log))}")
    return DONE


def _call(run: Run, nproc: int | None, *, dry_run: bool) -> int:
    if nproc:
        raise UsageError(f"{run.id} calls a function, whose number of ranks is fixed: launch it again")
    if dry_run:
        print(f"would call the function of {run.id} again")
        return DONE
    begin = run.job_log.stat().st_size if run.job_log.exists() else 0
    restart(run)
    return Job(run).follow(sys.stdout, begin=begin)
