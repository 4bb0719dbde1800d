"""The ledger of a run: for each step its loss to the last bit, the samples it saw, and the state of random numbers.

Two runs that agree in every row have done the same. Rank 0 appends to `ledger.jsonl` at log points; an attempt that
goes on from a checkpoint makes some steps again, and its rows, which come later in the file, count. No torch here.

    {"kind": "order", "id": "5f0c...", "order": {...}}          what `data.order.locate` needs; named by its digest
    {"kind": "step", "step": 7, "loss": "0x1.9p-1", "samples": "a41e...", "batches": [["5f0c...", 448, 512]], ...}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.errors import UsageError
from headway.run import Run
from headway.system import environment, jsonlines


@final
@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """What one step did. Texts compare: equal means the same."""

    step: int
    attempt: int
    stage: str
    epoch: int
    world_size: int
    loss: str | None
    """the mean over all samples of the step, as `float.hex` writes it; None in a loop that does not tell it"""
    samples: str | None
    """digest of the sample numbers of the global batch; with "bytes:" before it, of what each rank was given instead,
    where the loader does not know its samples: such a digest belongs to one number of ranks"""
    random: str
    """digest of the random number generators of all ranks after the step"""
    batches: list[tuple[str, int, int]]
    """the order's id and the stretch of it, for each batch of the step"""

    def words(self) -> str:
        """For people."""
        loss = "no loss" if self.loss is None else f"loss {float.fromhex(self.loss):.9g} ({self.loss})"
        return f"step {self.step} (epoch {self.epoch}): {loss}, samples {self.samples}, random {self.random}"


@final
@dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """A ledger as it was read: all rows as they were written, and the last one of each step."""

    rows: list[LedgerRow]
    orders: Mapping[str, Mapping[str, Any]]

    @property
    def last(self) -> dict[int, LedgerRow]:
        """The row that counts, of each step, by step."""
        return {row.step: row for row in sorted(self.rows, key=lambda row: row.step)}

    @property
    def repeated(self) -> int:
        """How many steps were made again."""
        return len(self.rows) - len({row.step for row in self.rows})


def read(run: Run) -> list[LedgerRow]:
    """The row that counts of each step, in the order of steps.

    >>> read(Run.open("runs/digits-2026.11.15-14.30-x7k2"))[6].loss
    '0x1.9ap-1'
    """
    return list(load(run).last.values())


def load(run: Run) -> LedgerContents:
    """All that a run's ledger says. A last line that was cut off by a crash is left out."""
    if not run.ledger_file.exists():
        raise UsageError(
            f"{run.path} has no ledger: start the run with {environment.LEDGER}=1, or call pipe.enable_ledger()"
        )
    rows, orders = [], {}
    for line in jsonlines.read(run.ledger_file):
        kind = line.pop("kind")
        if kind == "order":
            orders[line["id"]] = line["order"]
        else:
            batches = [(str(order), int(start), int(stop)) for order, start, stop in line.pop("batches")]
            rows.append(LedgerRow(**line, batches=batches))
    return LedgerContents(rows=rows, orders=orders)


def digest(data: bytes) -> str:
    """A short name for some bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
