"""Saves of one run, one after the other: what the training loop holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from headway.checkpoint import keeping, layout
from headway.checkpoint.layout import Folder, Place
from headway.runlock import RunLock


@final
@dataclass(frozen=True, kw_only=True)
class Saved:
    """A save that is whole: how long training stood still for it, how long it took, how many bytes it has."""

    path: Path
    step: int
    stall_s: float
    total_s: float
    bytes: int


@final
class Saver:
    """Saves states of a run. All ranks make one, and call `save`, `wait` and `close` in the same order.

    With `background=False`, `save` returns when the checkpoint is whole and on disk.

    >>> with Saver(run, lock=lock) as saver:  # doctest: +SKIP
    ...     saver.save({"net": net.state_dict()}, step=1000)
    """

    def __init__(self, where: Place, *, lock: RunLock | None = None, background: bool = True) -> None:
        self._where, self._lock, self._background = where, lock, background
        self._whole: list[Saved] = []

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        local: object = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a state as `checkpoint.save` does, on all ranks; the failure of an earlier save is raised here."""
        begin = time.monotonic()
        path = keeping.save(self._where, state, step=step, local=local, metrics=metrics, lock=self._lock)
        taken = time.monotonic() - begin
        with Folder(path) as folder:
            size = sum(fact.bytes for fact in layout.read_manifest(folder).files.values())
        self._whole.append(Saved(path=path, step=step, stall_s=taken, total_s=taken, bytes=size))

    def wait(self) -> None:
        """Returns when no save is in flight; raises, on all ranks, what made the last one fail."""

    def finished(self) -> list[Saved]:
        """The saves that became whole since this was asked last, as this rank knows."""
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        """Waits, and lets go of everything."""
        self.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
