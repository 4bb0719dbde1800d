"""The pipeline schedule: the layers of a rank, its microbatches in flight, and its idle time.

The schedule is 1F1B, interleaved if a rank has several chunks, or zero-bubble. The tests simulate it event by event.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from headway.plan.model.transformer import Transformer


def in_flight(pp: int, microbatches: int, stage: int, vpp: int = 1, schedule: str = "1f1b") -> int:
    """The maximum number of chunk activations that a rank keeps (of `vpp` chunks and `microbatches` each).

    1F1B warms up with p - stage forward passes, but at most one per microbatch: the smaller of the two numbers.
    Interleaved: Narayanan et al. 2021, section 2.2; on stage 0 that is Korthikanti's L(1 + (p-1)/(pv)).
    Zero-bubble: a later stage delays weight gradients, and therefore keeps as many as the first one.

    >>> in_flight(4, 8, 3, schedule="zero-bubble")
    4
    >>> in_flight(4, 8, 0), in_flight(4, 8, 3), in_flight(4, 2, 0), in_flight(4, 8, 0, vpp=2)
    (4, 1, 2, 11)
    """
    if schedule == "zero-bubble":
        return min(microbatches, pp)
    if vpp == 1:
        return min(microbatches, pp - stage)
    warmup = 2 * (pp - stage - 1) + (vpp - 1) * pp
    return min(warmup + 1, microbatches * vpp)


def chunk_runs(pp: int, microbatches: int, vpp: int) -> int:
    """The number of runs of consecutive backward passes of one chunk in a step: one per group of pp microbatches.

    With one chunk per rank, each pass counts as a run.

    >>> chunk_runs(4, 8, 1), chunk_runs(4, 8, 2), chunk_runs(4, 4, 2)
    (8, 2, 1)
    """
    return microbatches if vpp == 1 else microbatches // pp


def largest_chunk(layers: int, pp: int, vpp: int, stage: int) -> float:
    """Fraction of a stage's layers that its largest chunk has.

    >>> largest_chunk(10, 2, 2, 0)
    0.6
    """
    chunks = chunk_layers(layers, pp, vpp)[stage]
    return max(chunks) / max(1, sum(chunks))


WEIGHT_SHARE = 1 / 3
"""Weight gradients as a fraction of a microbatch's work; a zero-bubble schedule computes them when it would idle."""


def weights_owed(pp: int, microbatches: int, stage: int, kept: float = 1.0) -> int:
    """Microbatches whose weight gradients a zero-bubble rank may delay beyond their backward pass.

    Weight gradients need inputs and output gradients of all products: as many bytes as are saved if nothing is
    recomputed, of which a microbatch in flight keeps the fraction `kept`. A rank that recomputes delays as many as its
    free memory holds; with none, each layer's weight gradients follow its input gradients, as in 1F1B.

    >>> [weights_owed(4, 8, stage) for stage in range(4)], [weights_owed(4, 8, stage, 0.5) for stage in range(4)]
    ([1, 2, 3, 4], [0, 1, 1, 2])
    """
    if kept == 1:
        return min(microbatches, stage + 1)
    others = in_flight(pp, microbatches, stage) - 1
    return int(kept * (min(microbatches, pp) - others) + 1e-9)


def bubble_share(schedule: str, pp: int, microbatches: int, kept: float = 1.0) -> float:
    """Idle time of a schedule as a fraction of 1F1B's.

    Zero-bubble: weight gradients fill the rest (Qi et al. 2023, ZB-H1), as many as the last rank can delay. A rank that
    cannot delay any makes the next one wait.

    >>> bubble_share("1f1b", 4, 8), bubble_share("zero-bubble", 4, 8), bubble_share("zero-bubble", 4, 1)
    (1.0, 0.3333333333333333, 0.6666666666666666)
    >>> bubble_share("zero-bubble", 4, 8, kept=0.1)
    1.0
    """
    if schedule == "1f1b" or pp == 1:
        return 1.0
    owed = [weights_owed(pp, microbatches, stage, kept) for stage in range(1, pp)]
    return WEIGHT_SHARE * (2 * pp - 1 - max(1, owed[-1]) + owed.count(0)) / (pp - 1)


def bubble_fraction(
    pp: int, microbatches: int, vpp: int = 1, schedule: str = "1f1b", kept: float = 1.0
) -> float:
    """Idle time over ideal time (SC21, section 2.2): (p - 1) / (v m), less with a zero-bubble schedule.

    >>> bubble_fraction(1, 8), bubble_fraction(4, 8), bubble_fraction(4, 8, 2)
    (0.0, 0.375, 0.1875)
    >>> bubble_fraction(4, 8, schedule="zero-bubble")
    0.125
    """
    return bubble_share(schedule, pp, microbatches, kept) * (pp - 1) / (vpp * microbatches)


@lru_cache(maxsize=4096)
def chunk_layers(layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Layers of each chunk of each stage. A remainder goes to the middle: the ends have embedding and head.

    >>> chunk_layers(8, 2, 2)
    ((2, 2), (2, 2))
    >>> chunk_layers(10, 4)
    ((2,), (3,), (3,), (2,))
    """
    chunks = pp * vpp
    base, rest = divmod(layers, chunks)
    middle_first = sorted(range(chunks), key=lambda chunk: abs(2 * chunk - (chunks - 1)))
    longer = set(middle_first[:rest])
    counts = [base + (chunk in longer) for chunk in range(chunks)]
    return tuple(tuple(counts[stage + pp * turn] for turn in range(vpp)) for stage in range(pp))


class StageLayers(NamedTuple):
    """Layers of one stage: dense ones, and those with a mixture of experts."""

    dense: int
    mixture: int

    @property
    def total(self) -> int:
        return self.dense + self.mixture


@lru_cache(maxsize=4096)
def stage_layers(model: Transformer, pp: int, vpp: int = 1) -> tuple[StageLayers, ...]:
    """Layers of each stage by kind: the first layers of a model with experts are often dense."""
    counts = chunk_layers(model.layers, pp, vpp)
    dense, mixture, begin = [0] * pp, [0] * pp, 0
    for turn in range(vpp):
        for stage in range(pp):
            end = begin + counts[stage][turn]
            mixed = model.moe_layers_before(end) - model.moe_layers_before(begin)
            dense[stage] += end - begin - mixed
            mixture[stage] += mixed
            begin = end
    return tuple(StageLayers(*both) for both in zip(dense, mixture, strict=True))


@lru_cache(maxsize=4096)
def distinct_stages(model: Transformer, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """The stages that include the fullest one: first, last, and the earliest of each kind between them.

    Of two stages with the same layers the earlier one has at least as many microbatches in flight.
    """
    kinds: dict[StageLayers, int] = {}
    for stage, layers in enumerate(stage_layers(model, pp, vpp)[:-1]):
        if stage:
            kinds.setdefault(layers, stage)
    return tuple(sorted({0, pp - 1, *kinds.values()}))


def layers_in_flight(
    layers: int, pp: int, vpp: int, stage: int, microbatches: int, schedule: str = "1f1b"
) -> float:
    """Layer activations that a rank keeps at its peak."""
    chunks = chunk_layers(layers, pp, vpp)[stage]
    return in_flight(pp, microbatches, stage, vpp, schedule) * sum(chunks) / vpp
