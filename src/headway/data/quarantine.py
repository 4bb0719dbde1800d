"""Samples that could not be used, each listed once in a file per rank in the run directory.

runs/NAME/log/quarantine-00003.jsonl       {"dataset": "web", "shard": "/data/7.tar", "key": "a", "reason": "..."}
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, final

from headway import dist
from headway.errors import StorageError


class QuarantinedSample(NamedTuple):
    """A sample that could not be used."""

    dataset: str
    shard: str
    key: str
    reason: str


@final
class Quarantine:
    """Writes bad samples to the run directory, each of them once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def add(self, samples: Iterable[QuarantinedSample]) -> None:
        new = {(bad.shard, bad.key): bad for bad in samples if (bad.shard, bad.key) not in self._known}
        self._known |= new.keys()
        from headway.dist.shared_run import current_run  # needs torch

        run = current_run()
        if new and run is not None:
            path = run.quarantine_file(dist.rank())
            # a full disk, or a run that another process took, is no reason to stop here: they are counted all the same
            with suppress(StorageError), run.open_rows(path, content="bad samples") as rows:
                rows.write_all(bad._asdict() for bad in new.values())
