"""What a job runs: a command, where, with which variables, and how many times on each node.

It is written to job.json in the run directory when the job is submitted, and read there by the node agents. Nothing of
it passes through a shell.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from headway.errors import UsageError
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.system import files

_FORMAT = 1


@final
@dataclass(frozen=True, kw_only=True)
class Program:
    """A command and its surroundings; `processes` is the number of ranks on each node.

    >>> Program(command=["python", "train.py"], processes=4, env={"WANDB_MODE": "offline"})
    """

    command: Sequence[str]
    processes: int = 1
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: Sequence[str] = ()
    """put before PYTHONPATH: what the code of the run imports"""

    def environment(self, around: Mapping[str, str]) -> dict[str, str]:
        """The variables of the command, in these surroundings."""
        path = [*self.python_path, *filter(None, [around.get("PYTHONPATH")])]
        return {**around, **({"PYTHONPATH": os.pathsep.join(path)} if path else {}), **self.env}


@final
@dataclass(frozen=True, kw_only=True)
class JobFile:
    """job.json: all that a submitted run needs to start, and to be submitted again."""

    program: Program
    target: Slurm

    def write(self, run: Run) -> None:
        facts = {"format": _FORMAT, "program": asdict(self.program), "target": self.target.to_dict()}
        with files.storage(f"write {run.job_file}"):
            # 0600: variables may be secrets
            files.write_atomic(run.job_file, json.dumps(facts, indent=2).encode())

    @classmethod
    def read(cls, run: Run) -> JobFile:
        try:
            facts: dict[str, Any] = json.loads(run.job_file.read_bytes())
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']}")
            return cls(program=Program(**facts["program"]), target=Slurm.from_dict(facts["target"]))
        except FileNotFoundError:
            raise UsageError(f"{run.path} was not submitted: it has no {run.job_file.name}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{run.job_file} cannot be read: {error}; submit the run again") from error


def python_command(script: str, args: Sequence[str], *, module: bool = False) -> list[str]:
    """The command line of a script, or of a module as for `python -m`; `UsageError` if there is no such file.

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
