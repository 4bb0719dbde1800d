"""The interface of a sink, and functions that the sinks of this package share."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from headway.errors import MissingExtra, UsageError
from headway.record.media.index import MediaItem
from headway.run import Run
from headway.system import files

MetricRow = dict[str, Any]
"""A row of the metrics file: `kind`, `time`, `step`, usually `stage`, `epoch` and `metrics`; see `sinks.scalars`."""

RunStatus = Literal["done", "failed", "stopped", "interrupted"]
"""How an attempt ended; "stopped" means with a checkpoint, from which it can be resumed."""


class Sink(ABC):
    """Sends metric rows to another system. Subclass it and pass an instance to `pipe.add_sink`.

        @dataclass
        class Sqlite(Sink):
            file: str

            def open(self, run):
                self._database = sqlite3.connect(self.file)

            def write(self, rows):
                ...

            def close(self, status, exit_code):
                self._database.close()

    The fields of the dataclass are the settings. The training process only creates the instance; another process
    imports the class by name, creates an instance from the same settings, sent as JSON, and calls the three methods. So
    the class must be defined at the top level of a module or of the training script.
    """

    rank = 0
    """the rank whose rows are sent; always 0 unless `feeds_all_ranks`"""
    local_rank = 0
    name: ClassVar[str]
    """used in file names, such as `log/sink-NAME.txt`; by default the class name in lower case"""
    title: ClassVar[str]
    """used in messages; by default the class name"""

    replaces_steps: ClassVar[bool] = False
    """whether a step that a restart repeats replaces the first one; otherwise the sink gets each step once"""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in ("rank", "local_rank"):
            if name in cls.__dict__ or name in get_annotations(cls):
                raise UsageError(
                    f"sink {cls.__name__} defines {name!r}, which headway sets in the process that feeds it: choose "
                    "another name"
                )
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if "title" not in cls.__dict__:
            cls.title = cls.__name__

    @abstractmethod
    def open(self, run: Run) -> None:
        """Called once, in the feeding process, before any row. A resumed run opens its sinks again."""

    @abstractmethod
    def write(self, rows: Sequence[MetricRow]) -> None:
        """Takes the next rows, in file order.

        If it raises, this process ends, and the next attempt of the run sends the same rows again.
        """

    def write_media(self, items: Sequence[MediaItem]) -> None:  # noqa: B027
        """Takes the next images, figures, histograms and texts; `item.path(run)` is the file. Optional."""

    @property
    def feeds_all_ranks(self) -> bool:
        """Whether each rank has a process that sends its own rows; by default only rank 0 does."""
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
        raise UsageError(f"artifacts={patterns!r} is a string: give a list, such as [{patterns!r}]")
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
