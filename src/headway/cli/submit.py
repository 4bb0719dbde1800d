"""`headway submit`: submits a SLURM job that runs the code as it is now."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headway import schedulers
from headway.cli.parser import Parser, whole
from headway.errors import UsageError
from headway.launcher import submit_script
from headway.launcher.job import Job
from headway.launcher.submit_script import Script, SubmittedJob
from headway.launcher.targets import ClusterTarget, Slurm, read_target, target_fields

_EXAMPLES = """\
examples:
  headway submit --nodes 2 --gpus-per-node 8 --time 2:00:00 train.py --lr 3e-4
  headway submit --on cluster.yaml --array lr=1e-3,3e-4 seed=1,2,3 train.py
  headway submit --dry-run --nodes 2 train.py       show the job script, submit nothing
  headway submit --extra mail-type=END --setup 'module load cuda' --env WANDB_MODE=offline train.py

The job runs a copy of the code as it is now, in a new run directory, so you can keep editing. When it is preempted, or
its time is up, it saves and queues itself again.

Exit codes: 0 submitted; 2 refused, by headway or SLURM; with --watch, the job's.
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_sweep(argv)
    if options.json and options.watch:
        raise UsageError("--json and --watch do not go together: the output of a job is not JSON")
    target = _target(options)
    script = Script(name=options.script, args=options.args, module=options.module)
    root = Path(options.root)
    if options.dry_run:
        print(submit_script.dry_run(script, target, root=root, name=options.name), end="")
        return 0
    done = submit_script.submit(script, target, root=root, name=options.name, dirty=options.dirty)
    if options.json:
        print(json.dumps(done.to_dict(), indent=2))
    else:
        _show(done)
    return Job(done.runs[0]).follow(sys.stdout) if options.watch else 0


def _parser() -> Parser:
    parser = Parser("submit", "Submits a script as a SLURM job, with the code as it is now.", _EXAMPLES)
    parser.add_argument("--name", help="name of the run (default: the script's)")
    parser.add_argument("--root", default="runs", help="where run directories are made (default: runs)")
    parser.add_argument("--dirty", choices=("snapshot", "refuse", "live"), default="snapshot",
                        help="what to do about changes that are not committed: copy them, refuse, or run the files "
                        "where they lie (default: snapshot)")  # fmt: skip
    parser.add_argument("--on", metavar="FILE", help="settings from a YAML file; options override them")
    parser.add_argument("--dry-run", action="store_true", help="show the job script; submit nothing")
    parser.add_argument("--watch", action="store_true", help="show the job's output until it ends")
    parser.add_json()
    settings = parser.add_argument_group("settings of the job, as sbatch calls them")
    for each in target_fields(Slurm):
        _add(settings, each.name, each.type, each.metadata["help"])
    parser.add_script()
    return parser


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, help: str) -> None:
    """One option for one setting; those that are not given stay out of the result."""
    flag = f"--{name.replace('_', '-')}"
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
    if kind == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif kind in ("int", "int | None"):
        group.add_argument(flag, type=whole, metavar="N", **common)
    elif kind.startswith("Mapping"):
        group.add_argument(flag, action="append", metavar="NAME=VALUE", **common)
    elif kind.startswith("tuple"):
        group.add_argument(flag, action="append", metavar="TEXT", **common)
    else:
        group.add_argument(flag, metavar="TEXT", **common)


def _target(options: argparse.Namespace) -> ClusterTarget:
    values: dict[str, Any] = {}
    given = {each.name: getattr(options, each.name) for each in target_fields(Slurm) if each.name in options}
    if options.on is not None:
        found = read_target(Path(options.on))
        if not isinstance(found, ClusterTarget):
            raise UsageError(
                f"{options.on} describes {found.kind}; submit needs a cluster, such as 'kind: slurm'"
            )
        if not isinstance(found, Slurm):  # another scheduler: the options are SLURM's
            if given:
                raise UsageError(f"--{min(given).replace('_', '-')} is for SLURM: set it in {options.on}")
            return found
        values = found.to_dict()
    for name in ("env", "extra"):
        if name in given:
            given[name] = {**values.get(name, {}), **dict(_pair(name, text) for text in given[name])}
    return Slurm.from_dict({**values, **given})


def _pair(option: str, text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not equals and option == "env":
        raise UsageError(f"--env {text!r:.80}: write NAME=VALUE")
    return name, value if equals else True


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
    print(f"\n  {commands['look']}        is it waiting, is it running\n  tail -F {first.job_log}")
    print(f"  {commands['cancel']}              end it; it saves first")
