"""The ledger of a run: for each step, its loss to the last bit, its samples, and its random state.

Two runs whose rows are all equal have trained identically. `train.resume.ledger_writer` appends to `ledger.jsonl` on
rank 0, at log points; this module reads it. A resumed attempt repeats some steps; its rows come later in the file, and
replace those of earlier attempts. Needs no torch.

    {"kind": "order", "id": "5f0c...", "order": {...}}          the input of `SampleLookup`; its id is a digest
    {"kind": "step", "step": 7, "loss": "0x1.9p-1", "samples": "a41e...", "batches": [["5f0c...", 448, 512]], ...}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.errors import UsageError
from headway.run import Run
from headway.run.info import DAMAGED
from headway.system import environment, jsonlines


@final
@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One step. If all fields of two rows are equal, the steps were identical."""

    step: int
    attempt: int
    stage: str
    epoch: int
    world_size: int
    loss: str | None
    """the mean over all samples of the step, formatted by `float.hex`; None in a custom loop that does not log it"""
    samples: str | None
    """digest of the sample numbers of the global batch. If the loader has no sample numbers, it begins with "bytes:"
    and is a digest of the data of each rank, which can be compared only between equal numbers of ranks"""
    random: str
    """digest of the states of the random number generators of all ranks after the step"""
    batches: list[tuple[str, int, int]]
    """for each batch of the step: the id of its order, and its range in the order"""

    def describe(self) -> str:
        """Formats the row for people."""
        loss = "no loss" if self.loss is None else f"loss {float.fromhex(self.loss):.9g} ({self.loss})"
        return f"step {self.step} (epoch {self.epoch}): {loss}, samples {self.samples}, random {self.random}"


@final
@dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """The contents of a ledger: all rows in file order, and the orders that they refer to."""

    rows: list[LedgerRow]
    orders: Mapping[str, Mapping[str, Any]]

    @property
    def last(self) -> dict[int, LedgerRow]:
        """The last row of each step, by step."""
        return {row.step: row for row in sorted(self.rows, key=lambda row: (row.step, row.attempt))}

    @property
    def repeated(self) -> int:
        """How many steps were repeated."""
        return len(self.rows) - len({row.step for row in self.rows})


def read(run: Run) -> list[LedgerRow]:
    """Returns the last row of each step, in the order of steps.

    >>> read(Run.open("runs/digits-2026.11.15-14.30-x7k2"))[6].loss
    '0x1.9ap-1'
    """
    return list(load(run).last.values())


def load(run: Run) -> LedgerContents:
    """Reads a run's ledger. Incomplete lines are skipped."""
    if not run.ledger_file.exists():
        raise UsageError(
            f"{run.path} has no ledger: start the run with {environment.LEDGER}=1, or call pipe.enable_ledger()"
        )
    try:
        return _parse(jsonlines.read(run.ledger_file))
    except DAMAGED as error:
        raise UsageError(
            f"{run.ledger_file} cannot be read: it is damaged, or of another version of headway "
            f"({type(error).__name__}: {error!s:.200})"
        ) from error


def _parse(lines: Iterable[dict[str, Any]]) -> LedgerContents:
    rows, orders = [], {}
    for line in lines:
        kind = line.pop("kind")
        if kind == "order":
            orders[line["id"]] = line["order"]
        else:
            batches = [(str(order), int(start), int(stop)) for order, start, stop in line.pop("batches")]
            rows.append(LedgerRow(**line, batches=batches))
    return LedgerContents(rows=rows, orders=orders)


def digest(data: bytes) -> str:
    """Returns a short digest of some bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
