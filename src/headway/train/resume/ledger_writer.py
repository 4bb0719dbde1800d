"""Keeping the ledger while training: what each step saw and did, noted as it happens and written at log points.

Off unless asked for. A step costs a digest of the random number generators, some ten microseconds; losses stay on the
device until the log point, where all ranks' notes come together in one collective, and rank 0 writes them down. The
format and the reader are in `headway.record.ledger`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from headway.data.order import SampleLookup, TraceableLoader
from headway.dist import World
from headway.dist.collective.exchange import gather_rows
from headway.record.ledger import LedgerRow, digest
from headway.run import Run
from headway.system.jsonlines import JsonLinesWriter

if TYPE_CHECKING:
    from headway.train.stage import Stage

_EXACT = 6  # bytes of a digest that a double holds exactly


@dataclass(kw_only=True)
class _Step:
    """What one rank notes of one step."""

    step: int = 0
    epoch: int = 0
    samples: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    batches: list[tuple[str, int, int]] = field(default_factory=list)
    contents: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=_EXACT))
    unknown: bool = False
    """whether some batch came from a loader that does not know its samples"""
    random: bytes = b""


@final
class LedgerWriter:
    """Notes the steps of a run. Every rank has one; rank 0 writes.

    >>> pipe.enable_ledger()  # or HEADWAY_LEDGER=1
    """

    def __init__(self, run: Run, world: World, *, attempt: int) -> None:
        self._run, self._world, self._attempt = run, world, attempt
        self._now = _Step()
        self._steps: list[_Step] = []
        self._known: dict[str, SampleLookup] = {}  # orders that are in the file
        # of each loader: its order, and the order's id
        self._latest: dict[int, tuple[Mapping[str, Any], str]] = {}
        self._news: list[Mapping[str, Any]] = []
        self._rows: JsonLinesWriter | None = None

    def __enter__(self) -> LedgerWriter:
        if self._world.is_root:  # a full disk costs rows and not the run: readers see that they are missing
            self._rows = JsonLinesWriter(self._run.ledger_file, content="rows of the ledger")
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    # --- while a step is under way

    def add_batch(self, loader: object, batch: Any) -> None:
        """The loop has taken a batch, which is still where the loader has put it."""
        span = loader.last_span() if isinstance(loader, TraceableLoader) else None
        order = loader.order() if isinstance(loader, TraceableLoader) else None
        if span is None or order is None:
            self._now.unknown = True
            _feed(self._now.contents, batch)
        elif self._world.is_root:
            name = self._order(id(loader), order)
            self._now.batches.append((name, *span))
            self._now.samples.update(self._known[name].samples(*span).tobytes())

    def _order(self, loader: int, order: Mapping[str, Any]) -> str:
        before = self._latest.get(loader)
        if before is not None and before[0] == order:
            return before[1]
        name = digest(json.dumps(order).encode())
        self._latest[loader] = order, name
        if name not in self._known:
            self._known[name] = SampleLookup(order)
            self._news.append({"kind": "order", "id": name, "order": order})
        return name

    def end_step(self, stage: Stage) -> None:
        """A step is finished."""
        self._now.step, self._now.epoch = stage.pipe.steps_done, stage.epoch
        self._now.random = _random(stage.device)
        self._steps.append(self._now)
        self._now = _Step()

    # --- at a log point

    def write(self, stage: Stage) -> None:
        """Brings together what all ranks have noted since the last log point. Call it on all ranks."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        sums, weights = _losses(stage, steps)
        mine = [
            [total, weight, _number(step.random), _number(step.contents.digest())]
            for step, total, weight in zip(steps, sums, weights, strict=True)
        ]
        table = gather_rows(torch.tensor(mine, dtype=torch.float64).flatten()).reshape(-1, len(steps), 4)
        if self._rows is not None:
            rows = [self._row(stage, step, table[:, number]) for number, step in enumerate(steps)]
            self._rows.write_all([*self._news, *({"kind": "step"} | asdict(row) for row in rows)])
            self._news = []

    def _row(self, stage: Stage, noted: _Step, ranks: Tensor) -> LedgerRow:
        total, weight = (sum(column) for column in (ranks[:, 0].tolist(), ranks[:, 1].tolist()))
        contents = digest(ranks[:, 3].numpy().tobytes())
        return LedgerRow(
            step=noted.step,
            attempt=self._attempt,
            stage=stage.name,
            epoch=noted.epoch,
            world_size=self._world.world_size,
            loss=(total / weight).hex() if weight else None,
            samples=f"bytes:{contents}" if noted.unknown else noted.samples.hexdigest(),
            random=digest(ranks[:, 2].numpy().tobytes()),
            batches=noted.batches,
        )


def _losses(stage: Stage, steps: list[_Step]) -> tuple[list[float], list[float]]:
    """Of each step, the sum of this rank's losses, each times its samples, and the number of samples."""
    places = {noted.step: number for number, noted in enumerate(steps)}
    sums, weights = [0.0] * len(steps), [0.0] * len(steps)
    recent = [one for one in stage._loop.recent_losses if one[0] in places]
    if recent:
        values = torch.stack([loss for _, loss, _ in recent]).double().tolist()
        for (step, _, count), value in zip(recent, values, strict=True):
            sums[places[step]] += value * float(count)
            weights[places[step]] += float(count)
    return sums, weights


def _random(device: torch.device) -> bytes:
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=_EXACT)
    state.update(np.array(random.getstate()[1], dtype=np.uint32).tobytes())
    _, keys, position, *_ = np.random.get_state(legacy=True)
    state.update(np.asarray(keys).tobytes() + int(position).to_bytes(4, "little"))
    if device.type == "cuda":
        state.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state.digest()


def _number(data: bytes) -> float:
    return float(int.from_bytes(data[:_EXACT], "little"))


def _feed(state: Any, batch: Any) -> None:
    """Adds what a batch holds to a digest: tensors and arrays by their bytes, all else by its text."""
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            _feed(state, batch[key])
    elif isinstance(batch, tuple | list):
        for part in batch:
            _feed(state, part)
    elif isinstance(batch, Tensor):
        state.update(batch.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(batch, np.ndarray):
        state.update(batch.tobytes())
    else:
        state.update(repr(batch).encode())
