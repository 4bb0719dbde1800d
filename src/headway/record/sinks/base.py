"""The interface of a sink, and what the sinks of this package share."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from headway.errors import MissingExtra, UsageError
from headway.record.media.index import MediaItem
from headway.run import Run
from headway.system import files

MetricRow = dict[str, Any]
"""A row of the metrics file: `kind`, `time`, `step`, mostly `stage`, `epoch` and `metrics`; `scalars` flattens it."""

RunStatus = Literal["done", "failed", "stopped", "interrupted"]
"""How an attempt ended; "stopped" means with a checkpoint, to be resumed."""


class Sink(ABC):
    """Takes metric rows to another system. Subclass it and pass an object of it to `pipe.add_sink`.

        @dataclass
        class Sqlite(Sink):
            file: str

            def open(self, run):
                self._database = sqlite3.connect(self.file)

            def write(self, rows):
                ...

            def close(self, status, exit_code):
                self._database.close()

    The fields of the dataclass are the settings. The training process only makes the object; another process imports
    the class by its name, makes an object from the same settings, which travel as JSON, and calls the three methods
    there. So the class is defined at the top level of a module or of the training script.
    """

    rank = 0
    """whose rows these are; not 0 only if `feeds_all_ranks`"""
    local_rank = 0
    name: ClassVar[str]
    """names the sink's files, `log/sink-NAME.txt` and `metrics/sink-NAME.offset`; by default the class's, lower-case"""
    title: ClassVar[str]
    """names the sink in messages; by default the class's name"""

    replaces_steps: ClassVar[bool] = False
    """whether a step that a restart repeats takes the place of the first one; else the sink gets each step once"""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if "title" not in cls.__dict__:
            cls.title = cls.__name__

    @abstractmethod
    def open(self, run: Run) -> None:
        """Called once, in the feeding process, before any row. A resumed run opens its sinks again."""

    @abstractmethod
    def write(self, rows: Sequence[MetricRow]) -> None:
        """Takes the next rows, in the order of the file. If it raises, the next attempt gets them again."""

    def write_media(self, items: Sequence[MediaItem]) -> None:  # noqa: B027
        """Takes the next images, figures, histograms and texts; `item.path(run)` is the file. By default, none."""

    @property
    def feeds_all_ranks(self) -> bool:
        """Whether each rank has a process that feeds its own rows; by default rank 0 alone."""
        return False

    @abstractmethod
    def close(self, status: RunStatus, exit_code: int) -> None:
        """Called once, after the last row, with how the attempt ended."""


def find_artifacts(run: Run, patterns: Sequence[str]) -> list[Path]:
    """Returns the files and directories of a run directory that match: "config.yaml", "media/*", "report.html"."""
    return sorted({path for pattern in patterns for path in run.path.glob(pattern)})


def check_artifacts(patterns: Sequence[str]) -> None:
    """Raises `UsageError` for patterns of files that are not in the run directory."""
    if isinstance(patterns, str):
        raise UsageError(f"artifacts={patterns!r} is a text: give a list, such as [{patterns!r}]")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern or pattern.startswith("/") or ".." in pattern:
            raise UsageError(
                f"{pattern!r:.80} is not a valid artifact: give files of the run directory, such as 'config.yaml'"
            )


def require_package(package: str, sink: Sink) -> None:
    """Raises `MissingExtra` if the package that a sink writes with is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package, extra=package, purpose=f"to feed {sink.title}")


def run_config(run: Run) -> dict[str, Any]:
    """Returns the run's settings as they are in its directory, without secrets."""
    config = yaml.safe_load(files.read_regular(run.config_file))
    return config if isinstance(config, dict) else {}
