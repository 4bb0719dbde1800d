"""Faults: a process fails on purpose, at a place that the code names with `failpoint("...")`.

with faults.at("checkpoint.after_manifest", rank=1, nth=2, action="raise"):
    ...                                                     # this process, and what it starts

subprocess.run(command, env={**os.environ, **faults.at("dist.join", action="kill9").environ})
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import final

from headway.interpreter import module_command, module_environment
from headway.system import failpoints
from headway.system.environment import FAILPOINT


@final
@dataclass(frozen=True)
class Faults:
    """Faults to inject: `environ` for other processes, or a `with` block in this one. Add them with `+`."""

    text: str
    _outer: list[str | None] = field(default_factory=list, repr=False, compare=False)

    @property
    def environ(self) -> dict[str, str]:
        return {FAILPOINT: self.text}

    def __add__(self, other: Faults) -> Faults:
        return Faults(f"{self.text},{other.text}")

    def __enter__(self) -> Faults:
        self._outer.append(os.environ.get(FAILPOINT))
        failpoints.reset_calls()
        os.environ.update(self.environ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer = self._outer.pop()
        if outer is None:
            del os.environ[FAILPOINT]
        else:
            os.environ[FAILPOINT] = outer


def at(name: str, *, action: str, rank: int | None = None, nth: int = 1) -> Faults:
    """Returns a fault at the `nth` call of `failpoint(name)`, on one rank or, by default, on all.

    `action` is kill9, raise, stop, exit=CODE, sleep=SECONDS or errno=NAME.

    >>> at("checkpoint.after_manifest", rank=1, nth=2, action="kill9").environ
    {'HEADWAY_FAILPOINT': 'checkpoint.after_manifest:rank=1:nth=2:kill9'}
    """
    place = [name] if rank is None else [name, f"rank={rank}"]
    text = ":".join([*place, f"nth={nth}", action] if nth != 1 else [*place, action])
    failpoints.parse(text)
    return Faults(text)


def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    nproc: int,
    fault: Faults | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a script on `nproc` ranks of this machine, as `headway run` does, and returns exit code and output.

    >>> run("train.py", ["--epochs", "1"], nproc=2, fault=at("train.step", rank=1, action="kill9")).returncode
    1
    """
    command = module_command("headway", "run", "--nproc", str(nproc), str(script), *args)
    environ = {name: value for name, value in module_environment().items() if name != FAILPOINT}
    environ |= fault.environ if fault else {}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
