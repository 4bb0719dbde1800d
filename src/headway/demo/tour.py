"""The steps of the tour."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.console import Console
from rich.text import Text

from headway.demo.shell import Shell
from headway.errors import UsageError
from headway.run import Run, runs_under
from headway.system.text import format_duration

_SHAPES = 6  # as many as draw.py draws


@final
@dataclass(frozen=True, kw_only=True)
class TourSize:
    """How much the tour trains."""

    each: int
    """pictures of each shape"""
    epochs: int
    batch: int

    @property
    def kill_step(self) -> int:
        """The middle of the first epoch of the second half."""
        return round((self.epochs // 2 + 0.5) * self.each * _SHAPES / self.batch)

    @property
    def options(self) -> str:
        """The options of train.py."""
        return f"--epochs {self.epochs} --batch {self.batch}"


FULL = TourSize(each=300, epochs=8, batch=64)
QUICK = TourSize(each=16, epochs=2, batch=16)


def give_tour(directory: Path, screen: Console, *, size: TourSize = FULL) -> Path:
    """Runs the tour in a directory that is new or empty, and returns its report; raises if a step fails.

    >>> give_tour(Path("headway-demo"), Console())  # doctest: +SKIP
    PosixPath('headway-demo/runs/shapes-2026.11.16-14.30-x7k2/report.html')
    """
    shell = Shell(_prepare(directory), screen)
    screen.print(Text("A small training is killed and resumed: a minute or two on two cores.", "bold"))
    shell.show(f"cd {shlex.quote(str(directory))}")
    _make_data(shell, size)
    _plan(shell, size)
    killed = _train(shell, size)
    whole = _prove(shell, size, killed)
    _report(shell, killed)
    _conclude(shell, screen, killed, whole)
    return killed.report_file


def scripts() -> list[Path]:
    """Returns the scripts that the tour copies and runs."""
    return [Path(__file__).with_name(name) for name in ("draw.py", "train.py")]


def _prepare(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty: give the demo a directory of its own")
        for script in scripts():
            shutil.copyfile(script, directory / script.name)
    except OSError as error:
        raise UsageError(f"{directory} cannot be made: {error.strerror}; give another directory") from error
    return directory.resolve()


def _make_data(shell: Shell, size: TourSize) -> None:
    shell.begin_step("Make a small image set", "Shapes, drawn by a script; nothing is downloaded.")
    arrays = "" if importlib.util.find_spec("PIL") else " --arrays"
    shell.type(f"python draw.py pictures --each {size.each}{arrays}")
    shell.begin_step(
        "Pack it into shards",
        "Tar files in random order, with index and checksums: they are read in sequence.",
    )
    for split in ("train", "val"):
        shell.type(f"headway data pack pictures/{split} shards/{split}")


def _plan(shell: Shell, size: TourSize) -> None:
    shell.begin_step(
        "Plan the run",
        "Traced without a GPU: would the network fit on an H200, and how long would a step take there?",
    )
    batch = size.batch // 2
    shell.type(
        f"headway plan module train.py:make_net --loss cross_entropy --precision fp32 --batch-size {batch}"
    )


def _train(shell: Shell, size: TourSize) -> Run:
    shell.begin_step(
        "Train on two processes, and kill one of them",
        f"Rank 1 gets kill -9 at step {size.kill_step}, in the middle of an epoch. Nothing warns it.",
    )
    line = f"headway run --nproc 2 train.py {size.options}"
    fault = f"train.step:rank=1:nth={size.kill_step}:kill9"
    shell.type(line, fails=True, HEADWAY_FAILPOINT=fault)
    shell.begin_step("Resume", "The same command again. It finds the run, and its newest checkpoint.")
    shell.type(line)
    (run,) = runs_under(shell.directory / "runs")
    return run


def _prove(shell: Shell, size: TourSize, killed: Run) -> Run:
    shell.begin_step(
        "Prove it",
        "The same training again, not interrupted. Then each step of both runs is compared: losses, samples, random "
        "numbers, and the last checkpoint.",
    )
    shell.type(f"headway run --nproc 2 train.py {size.options}")
    (whole,) = (run for run in runs_under(shell.directory / "runs") if run.id != killed.id)
    shell.type(f"headway compare {killed.id[-4:]} {whole.id[-4:]} --exact")
    return whole


def _report(shell: Shell, killed: Run) -> None:
    shell.begin_step(
        "Where did the time go?", "In the terminal, and on a page with curves, settings and ranks."
    )
    shell.type(f"headway report {killed.id[-4:]} --times")


def _conclude(shell: Shell, screen: Console, killed: Run, whole: Run) -> None:
    began = killed.info()["attempts"][-1]["step_started"]
    verdict = Text.assemble(
        "\n",
        ("Killed, resumed, and the same to the last bit", "bold green"),
        f": the run {killed.id[-4:]} was killed, resumed from step {began}, and did in every step what {whole.id[-4:]} "
        f"did, which was not interrupted. The demo took {format_duration(shell.seconds)}.\n",
    )
    screen.print(verdict)
    for label, words, style in (
        ("report", str(killed.report_file), "cyan"),
        ("files", str(shell.directory), "cyan"),
        (
            "next",
            "read train.py there; headway web shows runs in a browser; headway --help lists the verbs",
            "",
        ),
        ("remove", f"rm -r {shlex.quote(str(shell.directory))}", ""),
    ):
        # paths are not broken
        screen.print(Text.assemble((f"{label:<8}", "dim"), (words, style)), soft_wrap=True)
