"""The client for SLURM's programs, through which all of headway runs them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from headway.system.environment import OF_A_JOB

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_NOT_INSTALLED, _TIMED_OUT = 127, 124


@final
@dataclass(frozen=True, kw_only=True)
class SlurmAnswer:
    """The answer of one of SLURM's programs. A program that is missing or too slow counts as an error."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def not_installed(self) -> bool:
        return self.code == _NOT_INSTALLED

    @property
    def timed_out(self) -> bool:
        return self.code == _TIMED_OUT

    @property
    def reason(self) -> str:
        """The last line of an error, without the name of the program.

        >>> SlurmAnswer(code=1, err="scontrol: error: Invalid job id specified").reason
        'Invalid job id specified'
        """
        lines = self.err.strip().splitlines() or ["no reason given"]
        return re.sub(r"^\w+: (error: )?", "", lines[-1])

    @property
    def lines(self) -> list[str]:
        """The lines of the output that are not blank; none after an error."""
        return [line.strip() for line in self.out.splitlines() if line.strip()] if self.code == 0 else []


@final
class SlurmClient:
    """Runs SLURM's programs, without the variables of the job in which this process itself may run.

    >>> SlurmClient().run("squeue", "--me").lines  # doctest: +SKIP
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def run(
        self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 10.0
    ) -> SlurmAnswer:
        """Runs a program; `env` are further variables for it. Raises nothing."""
        clean = {
            name: value
            for name, value in self._environ.items()
            if name in _KEPT or not (name in OF_A_JOB or name.startswith(("SLURM_", "SRUN_")))
        }
        try:
            done = subprocess.run(
                command,
                input=stdin,
                env=clean | dict(env or {}),
                capture_output=True,
                text=True,
                errors="replace",  # a site's own messages may have another encoding
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError:
            return SlurmAnswer(code=_NOT_INSTALLED, err=f"{command[0]} is not installed")
        except OSError as error:
            return SlurmAnswer(code=1, err=f"{command[0]} could not be started: {error.strerror}")
        except subprocess.TimeoutExpired:
            return SlurmAnswer(code=_TIMED_OUT, err=f"{command[0]} did not answer within {timeout_s:g} s")
        return SlurmAnswer(code=done.returncode, out=done.stdout, err=done.stderr)
