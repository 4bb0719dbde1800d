"""The program of a job: a command, its directory and variables, and how many ranks each node runs.

It is written to job.json in the run directory when the job is submitted, and read there by the node agents. Nothing in
it passes through a shell.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from headway.errors import UsageError
from headway.interpreter import module_command
from headway.launcher import targets
from headway.launcher.targets import ClusterTarget
from headway.run import Run
from headway.run.arguments import change, split_command
from headway.schedulers.base import JobIds
from headway.system import files, ownership
from headway.system.environment import STAGED

_FORMAT = 1


@final
@dataclass(frozen=True, kw_only=True)
class Program:
    """A command and its environment; `nproc` is the number of ranks on each node.

    >>> Program(command=["python", "train.py"], nproc=4, env={"WANDB_MODE": "offline"})
    """

    command: Sequence[str]
    nproc: int = 1
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: Sequence[str] = ()
    """directories to put before PYTHONPATH, from which the code of the run imports"""

    def changed(self, arguments: Sequence[str], env: Mapping[str, str]) -> Program:
        """Returns the program with changed arguments of its script, and further variables.

        >>> Program(command=["python", "train.py", "--lr", "1"]).changed(["--lr", "2"], {}).command
        ['python', 'train.py', '--lr', '2']
        """
        start, before = split_command(self.command)
        return replace(self, command=[*start, *change(before, arguments)], env={**self.env, **env})

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ` with the command's own variables added."""
        environ = {**environ, **self.env}  # a PYTHONPATH among them must not hide the copy of the code
        path = [*self.python_path, *filter(None, [environ.get("PYTHONPATH")])]
        return environ | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


@final
@dataclass(frozen=True, kw_only=True)
class JobFile:
    """job.json: everything that a submitted run needs to start, and to be submitted again."""

    program: Program
    target: ClusterTarget

    def write(self, run: Run) -> None:
        program = asdict(self.program)
        program["processes"] = program.pop("nproc")  # its name in the file
        facts = {"format": _FORMAT, "program": program, "target": self.target.to_dict()}
        with files.storage(f"write {run.job_file}"):
            # 0600: variables may be secrets
            files.write_atomic(run.job_file, json.dumps(facts, indent=2).encode())

    @classmethod
    def read(cls, run: Run) -> JobFile:
        try:
            facts: dict[str, Any] = json.loads(ownership.read_private(run.job_file))
            if facts["format"] != _FORMAT:
                raise ValueError(
                    f"it has format {facts['format']}, and this version of headway reads {_FORMAT}"
                )
            nproc = facts["program"].pop("processes")
            target = targets.from_dict(facts["target"])
            if not isinstance(target, ClusterTarget):
                raise ValueError(f"kind {target.kind}")
            return cls(program=Program(nproc=nproc, **facts["program"]), target=target)
        except FileNotFoundError:
            raise UsageError(f"{run.path} was not submitted: it has no {run.job_file.name}") from None
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{run.job_file} cannot be read: {error}; submit the run again") from error

    def ids(self, environ: Mapping[str, str]) -> JobIds:
        """Returns the ids of the job that `environ` belongs to."""
        ids = self.target.scheduler.detect(environ)
        if ids is None:
            raise UsageError(
                f"this process is not part of a {self.target.scheduler.label} job; submit the run instead"
            )
        return ids

    def launch_directory(self, run: Run, environ: Mapping[str, str]) -> Path:
        """Returns where the agents of this start of the job exchange records; every start has its own."""
        return run.launch_dir / self.ids(environ).start

    def staged_environment(self) -> dict[str, str]:
        """Returns the variable for the directory of data copied to this node; empty if no data was copied."""
        if not self.target.pre:
            return {}
        own_disk = self.target.scheduler.local_disk(os.environ) or ""
        directory = os.path.expandvars(self.target.pre_to or own_disk)
        if not directory or "$" in directory:
            raise UsageError(
                f"pre_to={self.target.pre_to!r}: not all of these variables are set on {socket.gethostname()}; "
                "give a directory on the node's own disk, like /scratch/$USER"
            )
        return {STAGED: directory}


def python_command(script: str, args: Sequence[str], *, module: bool = False) -> list[str]:
    """Returns the command line of a script, or of a module as for `python -m`; `UsageError` if there is no such file.

    >>> python_command("mypackage.train", ["--lr", "1"], module=True)[1:]
    ['-m', 'mypackage.train', '--lr', '1']
    """
    if module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).is_file():
        raise UsageError(
            f"there is no file {script!r} in {Path.cwd()}; for a module write: -m NAME, as for python -m"
        )
    return [sys.executable, script, *args]


def worker_command(run: Run) -> list[str]:
    """Returns the command line of a rank that calls the function of a run."""
    return module_command("headway.launcher.functions.worker", str(run.path))
