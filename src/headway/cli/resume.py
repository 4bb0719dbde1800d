"""`headway resume`: restarts a run as it was started, or with changed settings; or a fork of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from headway.cli.parser import Parser, positive
from headway.cli.screen import safe
from headway.errors import DONE, UsageError
from headway.launcher.enqueue import check_target, submit_runs
from headway.launcher.fork import fork
from headway.launcher.job import Job
from headway.launcher.job_start import restart
from headway.launcher.local_runs import local_program, resume_here
from headway.launcher.program import JobFile, Program
from headway.run import Run
from headway.run.choice import script_was_cut
from headway.run.status import Status, check_over
from headway.system import environment
from headway.watch.runs import resolve_one, summary_of

_EXAMPLES = """\
examples:
  headway resume runs/digits-2026.11.15-14.30-x7k2    or the end of its id: headway resume x7k2
  headway resume x7k2 -- --lr 1e-4                    with a changed argument of the script, which is applied
  headway resume x7k2 -- --epochs 40                  also a run that is done: it is trained further
  headway resume x7k2 --apply                         with settings that were changed in the script itself
  headway resume x7k2 --fork -- --lr 1e-4             a run of its own, from the newest checkpoint; x7k2 stays as it is
  headway resume x7k2 --nodes 4                       a job of SLURM, on another number of nodes
  headway resume x7k2 --nodes 2-4                     as many of them as are free
  headway resume x7k2 --nproc 2                       a run of this machine, on another number of processes
  headway resume x7k2 --dry-run                       show what would be started; start nothing

A job is submitted again with the same settings and code, and its new number is recorded. A run of this machine starts
in the directory where it was started before. A pipeline resumes from its newest checkpoint. Options and NAME=VALUE
after -- change those of the run, or are added; arguments that begin with a plain word replace all.

Exit codes: 0 submitted, or the run succeeded; 2 the run is queued, running or done already; else the run's.
"""


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    argv, arguments = argv[:end], argv[end + 1 :]
    parser = Parser("resume", "Restarts a stopped or failed run as it was started.", _EXAMPLES)
    parser.usage = "headway resume [options] RUN [-- NEW ARGS]"
    parser.add_run()
    parser.add_argument(
        "--nodes", metavar="N", help="number of nodes, or a range such as 1-2, for a job of a scheduler"
    )
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="number of processes, for a run of this machine"
    )
    parser.add_argument(
        "--apply",
        action="store_true",
        help="apply settings of optimizers and schedulers that the script has changed, as new arguments do",
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="start a run of its own from the newest checkpoint; the run itself stays as it is",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be started; start nothing")
    options = parser.parse_args(argv)
    run = Run.open_private(resolve_one(options.run, options.root).path)
    changes = Changes(arguments=arguments, applies=options.apply or bool(arguments), forks=options.fork)
    if not changes.forks:
        _check(run, summary_of(run).status, trains_further=changes.applies)
    if run.job_file.exists():
        if options.nproc:
            raise UsageError(
                f"{run.id} is a job of a scheduler, which starts it: use --nodes instead of --nproc"
            )
        return _submit(run, options.nodes, changes, dry_run=options.dry_run)
    if options.nodes:
        raise UsageError(f"{run.id} was started on this machine: use --nproc instead of --nodes")
    if run.call_dir.is_dir():
        if changes.applies or changes.forks:
            raise UsageError(f"{run.id} calls a function, which has no arguments to change: launch it again")
        return _call(run, options.nproc, dry_run=options.dry_run)
    program = local_program(run, nproc=options.nproc).changed(arguments, changes.env)
    if options.dry_run:
        print(safe(f"would start on {program.nproc} processes: {shlex.join(program.command)}"))
        return DONE
    if changes.forks:
        run, program = _forked(run, program)
    return resume_here(run, program)


@final
@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is different from the last start of a run."""

    arguments: Sequence[str]
    """they change those of the script"""
    applies: bool
    """whether settings that have changed are applied"""
    forks: bool
    """whether the changes are those of a new run"""

    @property
    def env(self) -> dict[str, str]:
        """The variables of the ranks."""
        return {environment.APPLY: "1"} if self.applies else {}


def _forked(run: Run, program: Program) -> tuple[Run, Program]:
    made, program = fork(run, program)
    print(safe(f"{made.id} begins with {made.parent_checkpoint()}"))
    return made, program


def _check(run: Run, now: Status, *, trains_further: bool) -> None:
    if now.state == "done" and not trains_further and script_was_cut(run) is False:  # the user named this run
        raise UsageError(
            f"{run.id} is done: there is nothing to resume; to train it further, change its limits, as in "
            f"headway resume {run.shell_name} -- --epochs 40"
        )
    if now.state != "new":
        check_over(run, now)


def _submit(run: Run, nodes: str | None, changes: Changes, *, dry_run: bool) -> int:
    job = JobFile.read(run)
    program = job.program.changed(changes.arguments, changes.env)
    if dry_run:
        words = f": {shlex.join(program.command)}" if changes.applies else ""
        print(safe(f"would submit {run.job_script} again" + (f", on {nodes} nodes" if nodes else "") + words))
        return DONE
    if changes.forks:
        target = job.target.without_array()
        if nodes is not None:
            target = replace(target, nodes=nodes)  # type: ignore[type-var]
        check_target(target)
        run, program = _forked(run, program)
        submit_runs([run], [program], target)
    else:
        restart(run, nodes=nodes, arguments=changes.arguments, env=changes.env)
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
