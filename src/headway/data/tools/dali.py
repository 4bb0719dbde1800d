"""Batches of raw bytes for a DALI pipeline: its decoders and augmentations, our order, proportions and exact resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from headway.data.catalog.shard_files import ShardSpec
from headway.data.shard_loader import ShardLoader
from headway.data.shards.decode import raw_bytes
from headway.data.sources.mix import Mix
from headway.errors import HeadwayError, UsageError

_MAX_STATES = 256  # many more batches than DALI prefetches


@final
class DaliSource:
    """A callable for DALI's `external_source`: the bytes of samples in the order of a `ShardLoader`, with positions.

        source = hw.data.DaliSource(mix, batch_size=64, parts=("jpg", "cls"), seed=0)

        @pipeline_def(batch_size=64, num_threads=8, device_id=0)
        def pipeline():
            jpg, cls, end = fn.external_source(source, num_outputs=3)
            return fn.decoders.image(jpg, device="mixed"), cls, end

        images, labels, end = pipe.run()
        state = source.state_dict(int(end.at(0)[0]))      # resumes after this very batch
        source.load_state_dict(state)                     # in a new process, before the pipeline is built

    Each output is a list of uint8 arrays, one for each sample; the last one holds the position after the batch, because
    DALI reads ahead of what it has returned. A pass ends with `StopIteration`, on which DALI's pipeline ends, too;
    after `pipe.reset()` the next pass begins. `settings` are those of `ShardLoader`.

    The bytes of `parts` are not checked: an image that DALI cannot decode stops its pipeline. Name all images in
    `parts`: others are decoded here, and dropped.
    """

    def __init__(
        self,
        source: Mix | ShardSpec,
        batch_size: int | None = None,
        *,
        parts: Sequence[str] = ("jpg", "cls"),
        **settings: Any,
    ) -> None:
        if taken := {"transform", "decoders", "collate_fn", "device"} & settings.keys():
            raise UsageError(
                f"DaliSource({min(taken)}=...): DALI decodes and transforms the samples; remove it, or use ShardLoader"
            )
        self.parts = tuple(parts)
        self.loader = ShardLoader(
            source,
            batch_size,
            decoders=dict.fromkeys(self.parts, raw_bytes),
            collate_fn=self._columns,
            **settings,
        )
        self._batches: Iterator[list[list[npt.NDArray[Any]]]] | None = None
        self._states: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> DaliSource:
        """Begins a pass, or continues the one that was restored."""
        self._batches = iter(self.loader)
        return self

    def __next__(self) -> tuple[list[npt.NDArray[Any]], ...]:
        """Returns the next batch: a list of arrays for each of the parts, and one of positions."""
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        try:
            columns = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        state = self.loader.state_dict()
        self._states[state["position"]] = state
        if len(self._states) > _MAX_STATES:
            del self._states[next(iter(self._states))]
        return *columns, [np.array([state["position"]])] * len(columns[0])

    def state_dict(self, end: int) -> dict[str, Any]:
        """Returns the state of the loader after the batch whose last output is `end`."""
        if end not in self._states:
            raise UsageError(
                f"state_dict({end}): no batch of the last {_MAX_STATES} ends at this position"
                "; pass the position that came with a recent one"
            )
        return self._states[end]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch of a state, on any number of ranks."""
        self.loader.load_state_dict(state)
        self._batches = None
        self._states.clear()

    def _columns(self, samples: list[dict[str, Any]]) -> list[list[npt.NDArray[Any]]]:
        for sample in samples:
            if missing := [part for part in self.parts if part not in sample]:
                raise HeadwayError(
                    f"sample {sample['__key__']!r} has no {missing[0]!r} but {', '.join(sample)}: name parts that all "
                    "samples have"
                )
        return [[sample[part] for sample in samples] for part in self.parts]
