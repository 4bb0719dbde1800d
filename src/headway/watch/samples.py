"""Finds the samples of a step of a run, from its ledger; needs neither torch nor the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

from headway.data.order import SampleLookup
from headway.errors import UsageError
from headway.record import ledger
from headway.record.ledger import LedgerRow
from headway.run import Run


@final
@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The samples of one step, and its row in the ledger."""

    row: LedgerRow
    samples: list[str]
    """of all ranks, in the order of the global batch"""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)


def samples_of(run: Run, step: int) -> StepSamples:
    """Returns the samples of a step, in the last attempt that ran it.

    >>> samples_of(Run.open("runs/digits-2026.11.15-14.30-x7k2"), 37).samples
    ['4711', '12', '903', ...]
    """
    found = ledger.load(run)
    row = found.last.get(step)
    if row is None:
        steps = found.last
        known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no step yet"
        raise UsageError(f"the ledger of {run.id} has no step {step}; {known}")
    if not row.batches:
        raise UsageError(
            f"step {step} of {run.id} used a data loader that does not record its samples; use "
            "hw.data.DataLoader or hw.data.ShardLoader"
        )
    if missing := {order for order, *_ in row.batches} - found.orders.keys():
        raise UsageError(
            f"the ledger of {run.id} lacks order {min(missing)}, which step {step} used: its row was lost on a full "
            "disk, or the file is damaged"
        )
    samples = [
        name
        for order, start, stop in row.batches
        for name in SampleLookup(found.orders[order]).labels(start, stop)
    ]
    return StepSamples(row=row, samples=samples)
