"""Runs the commands of the tour, and prints each as a user would type it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from rich.console import Console
from rich.text import Text

from headway.errors import HeadwayError
from headway.interpreter import module_command

_PROGRAMS = {"headway": module_command("headway"), "python": [sys.executable]}
"""of this installation, which need not be on the PATH"""


@final
class Shell:
    """Runs commands in a directory: prints each command, and passes its output through.

    >>> Shell(Path("headway-demo"), Console()).type("headway data pack pictures/train shards/train")
    """

    def __init__(self, directory: Path, screen: Console) -> None:
        self.directory, self._screen, self._steps = directory, screen, 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time since the first step."""
        return time.monotonic() - self._began

    def begin_step(self, title: str, words: str) -> None:
        """Prints the heading of a step, and a sentence about it."""
        self._steps += 1
        self._screen.print(Text.assemble("\n", (f"{self._steps}  {title}", "bold")), soft_wrap=True)
        self._screen.print(Text(words, "dim"))

    def show(self, line: str) -> None:
        """Prints a command without running it."""
        prompt = Text.assemble("\n", ("$ ", "green"), (line, "bold cyan"))
        self._screen.print(prompt, soft_wrap=True)
        self._screen.file.flush()  # before the output of the command

    def type(self, line: str, *, fails: bool = False, **variables: str) -> None:
        """Runs a command; raises `HeadwayError` unless it ends with 0, or with another code if it `fails`."""
        self.show(" ".join([*(f"{name}={value}" for name, value in variables.items()), line]))
        program, *words = shlex.split(line)
        code = self._wait([*_PROGRAMS[program], *words], variables)
        if fails and code == 0:
            raise HeadwayError(f"`{line}` ended with exit code 0, though a rank was to be killed")
        if not fails and code != 0:
            raise HeadwayError(
                f"`{line}` ended with exit code {code}: the demo stops here; its files are in {self.directory}"
            )

    def _wait(self, command: list[str], variables: Mapping[str, str]) -> int:
        # HEADWAY_ variables could name another run, or a fault
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        child = subprocess.Popen(
            command, cwd=self.directory, env=environ | dict(variables), stdin=subprocess.DEVNULL
        )
        try:
            return child.wait()
        except KeyboardInterrupt:  # the command got it, too, and may have to save
            child.wait()
            raise
