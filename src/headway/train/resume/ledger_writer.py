"""`LedgerWriter`: loss, samples and random state of each step, collected during steps and written at log points.

It is off by default. A step costs a digest of the random number generators, some 10 us. Losses stay on the device until
the log point, where one collective gathers the entries of all ranks and rank 0 writes them. The format and the reader
are in `headway.record.ledger`. `Ledger` does the same for a loop without a `Pipeline`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from headway import dist
from headway.data.order import SampleLookup, TraceableLoader
from headway.dist import World
from headway.dist.collective.exchange import gather_rows
from headway.errors import UsageError
from headway.record import Recording
from headway.record.ledger import LedgerRow, digest
from headway.run import Run
from headway.system.failpoints import failpoint
from headway.system.jsonlines import JsonLinesWriter

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState

StepLoss = tuple[int, Tensor, float]
"""the step of a loss, the loss, and its weight"""

_EXACT_BYTES = 6  # bytes of a digest that a double holds exactly


@dataclass(kw_only=True)
class _StepEntry:
    """The entry of one rank for one step."""

    step: int = 0
    epoch: int = 0
    samples: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    batches: list[tuple[str, int, int]] = field(default_factory=list)
    contents: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=_EXACT_BYTES))
    unknown: bool = False
    """whether some batch came from a loader that does not know its samples"""
    random: bytes = b""


@final
class LedgerWriter:
    """Records the steps of a run. Every rank has one; rank 0 writes the file.

    >>> pipe.enable_ledger()  # or HEADWAY_LEDGER=1
    """

    def __init__(self, run: Run, world: World, *, attempt: int) -> None:
        self._run, self._world, self._attempt = run, world, attempt
        self._current = _StepEntry()
        self._steps: list[_StepEntry] = []
        self._known: dict[str, SampleLookup] = {}  # orders that are in the file or about to be
        # by loader: its newest order, and the order's id
        self._latest: dict[int, tuple[Mapping[str, Any], str]] = {}
        self._new_orders: list[Mapping[str, Any]] = []
        self._rows: JsonLinesWriter | None = None

    def __enter__(self) -> LedgerWriter:
        if self._world.is_root:  # a full disk loses rows but not the run; readers see the gap
            self._rows = self._run.open_rows(self._run.ledger_file, content="rows of the ledger")
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    # --- in a step

    def add_batch(self, loader: object, batch: Any) -> None:
        """Adds a batch to the current step. Call it before the batch moves to the device."""
        span = loader.last_span() if isinstance(loader, TraceableLoader) else None
        order = loader.order() if isinstance(loader, TraceableLoader) else None
        if span is None or order is None:
            self._current.unknown = True
            _hash_batch(self._current.contents, batch)
        elif self._world.is_root:
            name = self._order_id(id(loader), order)
            self._current.batches.append((name, *span))
            self._current.samples.update(self._known[name].samples(*span).tobytes())

    def _order_id(self, loader: int, order: Mapping[str, Any]) -> str:
        """Returns the id of an order, and queues a row for a new one."""
        before = self._latest.get(loader)
        if before is not None and before[0] == order:
            return before[1]
        name = digest(json.dumps(order).encode())
        self._latest[loader] = order, name
        if name not in self._known:
            self._known[name] = SampleLookup(order)
            self._new_orders.append({"kind": "order", "id": name, "order": order})
        return name

    def end_step(self, step: int, *, epoch: int) -> None:
        """Completes the entry of a step."""
        self._current.step, self._current.epoch = step, epoch
        self._current.random = _rng_digest(self._world.device)
        self._steps.append(self._current)
        self._current = _StepEntry()

    # --- at a log point

    def write(self, stage: str, losses: Iterable[StepLoss]) -> None:
        """Gathers the entries of all ranks since the last log point, and writes them. Call it on all ranks."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        sums, weights = _sum_losses(losses, steps)
        mine = [
            [total, weight, _number(step.random), _number(step.contents.digest())]
            for step, total, weight in zip(steps, sums, weights, strict=True)
        ]
        table = gather_rows(torch.tensor(mine, dtype=torch.float64).flatten()).reshape(-1, len(steps), 4)
        if self._rows is not None:
            rows = [self._row(stage, step, table[:, number]) for number, step in enumerate(steps)]
            lines = [*self._new_orders, *({"kind": "step"} | asdict(row) for row in rows)]
            # otherwise these orders are written again with the next rows, which need them
            if not self._rows.write_all(lines):
                self._new_orders = []

    def _row(self, stage: str, noted: _StepEntry, ranks: Tensor) -> LedgerRow:
        total, weight = (sum(column) for column in (ranks[:, 0].tolist(), ranks[:, 1].tolist()))
        contents = digest(ranks[:, 3].numpy().tobytes())
        return LedgerRow(
            step=noted.step,
            attempt=self._attempt,
            stage=stage,
            epoch=noted.epoch,
            world_size=self._world.world_size,
            loss=(total / weight).hex() if weight else None,
            samples=f"bytes:{contents}" if noted.unknown else noted.samples.hexdigest(),
            random=digest(ranks[:, 2].numpy().tobytes()),
            batches=noted.batches,
        )


@final
class Ledger:
    """The ledger of a loop of your own, for `headway verify-resume` and `headway runs samples`.

        with hw.record.recording(run, world) as attempt, hw.train.Ledger(attempt) as ledger:
            for step, (x, y) in enumerate(train, 1):
                ...
                ledger.add(step, loss, train, weight=len(x))
                if step % 1000 == 0:
                    ledger.write()
                    hw.checkpoint.save(run, state, step=step, lock=attempt.lock)

    All ranks create one and make the same calls. `add` waits for nothing; `write` is one collective.
    """

    def __init__(self, attempt: Recording) -> None:
        self._attempt = attempt
        self._writer = LedgerWriter(attempt.run, dist.world(), attempt=attempt.attempt)
        self._losses: list[StepLoss] = []
        self._started = False

    def __enter__(self) -> Ledger:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writer:
            if kind is None:  # else other ranks may not be here
                self.write()

    def add(self, step: int, loss: Tensor, loader: object, *, weight: float = 1.0, epoch: int = 0) -> None:
        """Adds a step, counted from 1 over the whole run: its mean loss over `weight` samples, and its batch.

        The batch is the last one of `loader`, a `hw.data.DataLoader` or `hw.data.ShardLoader`.
        """
        if not isinstance(loader, TraceableLoader) or loader.last_span() is None:
            raise UsageError(
                f"the ledger got a {type(loader).__name__}, which does not know the samples of its last batch: pass "
                "the hw.data.DataLoader or hw.data.ShardLoader that the loop reads"
            )
        if not self._started and dist.is_root():
            self._attempt.run.note_attempt(self._attempt.attempt, step_started=step - 1)
        self._started = True
        self._writer.add_batch(loader, None)
        self._losses.append((step, loss.detach(), weight))
        self._writer.end_step(step, epoch=epoch)
        failpoint("train.step")

    def write(self) -> None:
        """Writes the rows of all steps so far. Call it before each save, so that no row of a saved step is lost."""
        self._writer.write("loop", self._losses)
        self._losses.clear()


def stage_losses(state: LoopState) -> Iterator[StepLoss]:
    """Yields the losses of a stage since the last log point."""
    for step, loss, count, weight in state.recent_losses:
        yield step, loss, float(count if weight is None else weight)


def _sum_losses(losses: Iterable[StepLoss], steps: list[_StepEntry]) -> tuple[list[float], list[float]]:
    """Returns, for each step, the sum of this rank's losses times their weights, and the sum of the weights."""
    places = {noted.step: number for number, noted in enumerate(steps)}
    sums, weights = [0.0] * len(steps), [0.0] * len(steps)
    recent = [one for one in losses if one[0] in places]
    if recent:
        values = torch.stack([loss for _, loss, _ in recent]).tolist()
        for (step, _, weight), value in zip(recent, values, strict=True):
            sums[places[step]] += value * weight
            weights[places[step]] += weight
    return sums, weights


def _rng_digest(device: torch.device) -> bytes:
    """Returns a digest of the state of all random number generators."""
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=_EXACT_BYTES)
    state.update(np.array(random.getstate()[1], dtype=np.uint32).tobytes())
    _, keys, position, *_ = np.random.get_state(legacy=True)
    state.update(np.asarray(keys).tobytes() + int(position).to_bytes(4, "little"))
    if device.type == "cuda":
        state.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state.digest()


def _number(data: bytes) -> float:
    """Returns the first bytes of a digest as a float that represents them exactly."""
    return float(int.from_bytes(data[:_EXACT_BYTES], "little"))


def _hash_batch(state: Any, batch: Any) -> None:
    """Adds the content of a batch to a digest: tensors and arrays by their bytes, all else by its `repr`."""
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            _hash_batch(state, batch[key])
    elif isinstance(batch, tuple | list):
        for part in batch:
            _hash_batch(state, part)
    elif isinstance(batch, Tensor):
        state.update(batch.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(batch, np.ndarray):
        state.update(batch.tobytes())
    else:
        state.update(repr(batch).encode())
