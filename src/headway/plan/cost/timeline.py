"""One step of a pipeline, played pass by pass: which rank computes which microbatch, and when.

Plans draw this timeline; the tests compare it with the closed forms of `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from headway.plan.cost.schedule import WEIGHT_SHARE

Direction = Literal["forward", "backward", "weights"]
_Turn = tuple[Direction, int, int]  # direction, microbatch, chunk of the rank


class StagePass(NamedTuple):
    """A forward or backward pass of one microbatch through one chunk of a rank's layers.

    In a zero-bubble schedule, `backward` computes the input gradients and `weights` the weight gradients.
    """

    rank: int
    direction: Direction
    microbatch: int
    chunk: int
    start_s: float
    end_s: float


def play_schedule(
    stages: Sequence[tuple[float, float]],
    microbatches: int,
    vpp: int = 1,
    schedule: str = "1f1b",
    owed: Sequence[int] | None = None,
) -> list[StagePass]:
    """Plays 1F1B, interleaved with several chunks, or zero-bubble.

    `stages`: seconds of all chunks of a rank, forward and backward. `owed`: the number of microbatches whose weight
    gradients each rank of a zero-bubble schedule may delay (`schedule.weights_owed`).

    A rank works in a fixed order, and begins each pass as soon as the passes before it have ended.

    >>> [(p.rank, p.direction, p.start_s, p.end_s) for p in play_schedule([(1, 2), (1, 2)], 1)]
    [(0, 'forward', 0.0, 1.0), (1, 'forward', 1.0, 2.0), (1, 'backward', 2.0, 4.0), (0, 'backward', 4.0, 6.0)]
    """
    pp = len(stages)
    most = [0] * pp if schedule == "1f1b" else owed or range(1, pp + 1)
    seconds = [
        _pass_seconds(*stage, vpp=vpp, split=some > 0) for stage, some in zip(stages, most, strict=True)
    ]
    orders = [
        zero_bubble_order(pp, microbatches, rank, some) if some else rank_order(pp, microbatches, rank, vpp)
        for rank, some in enumerate(most)
    ]
    waiting = [list(reversed(order)) for order in orders]
    clock = [0.0] * pp
    ended: dict[tuple[Direction, int, int], float] = {}
    found: list[StagePass] = []
    while any(waiting):
        before = len(found)
        for rank, turns in enumerate(waiting):
            while turns:
                direction, microbatch, chunk = turns[-1]
                depth = chunk * pp + rank
                needed = _needed(direction, microbatch, depth, pp * vpp)
                if needed is not None and needed not in ended:
                    break
                turns.pop()
                start = max(clock[rank], ended[needed] if needed else 0.0)
                clock[rank] = start + seconds[rank][direction]
                ended[direction, microbatch, depth] = clock[rank]
                found.append(StagePass(rank, direction, microbatch, chunk, start, clock[rank]))
        assert len(found) > before, "the schedule deadlocks"
    return found


def rank_order(pp: int, microbatches: int, rank: int, vpp: int = 1) -> list[_Turn]:
    """The passes of one rank in order (Narayanan et al. 2021): forward passes to warm up, then alternating ones."""
    total = microbatches * vpp
    ahead = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warmup = min(ahead, total)
    forward = [_turn("forward", index, pp, vpp) for index in range(total)]
    backward = [_turn("backward", index, pp, vpp) for index in range(total)]
    in_turn = [turn for both in zip(forward[warmup:], backward, strict=False) for turn in both]
    return [*forward[:warmup], *in_turn, *backward[total - warmup :]]


def zero_bubble_order(pp: int, microbatches: int, rank: int, owed: int) -> list[_Turn]:
    """The passes of one rank in ZB-H1 (Qi et al. 2023): 1F1B with weight gradients `owed` - 1 microbatches later."""
    found: list[_Turn] = []
    later = owed - 1
    for turn in rank_order(pp, microbatches, rank):
        found.append(turn)
        direction, microbatch, _ = turn
        if direction == "backward" and microbatch >= later:
            found.append(("weights", microbatch - later, 0))
    return found + [("weights", left, 0) for left in range(max(0, microbatches - later), microbatches)]


def _pass_seconds(forward: float, backward: float, *, vpp: int, split: bool) -> dict[Direction, float]:
    """Seconds of each pass through one chunk."""
    weights = WEIGHT_SHARE * (forward + backward) if split else 0.0
    return {"forward": forward / vpp, "backward": (backward - weights) / vpp, "weights": weights}


def _turn(direction: Direction, index: int, pp: int, vpp: int) -> _Turn:
    """With chunks, groups of pp microbatches pass chunk after chunk, backward from the last one."""
    group, inside = divmod(index, pp * vpp)
    chunk, within = divmod(inside, pp)
    return direction, group * pp + within, chunk if direction == "forward" else vpp - 1 - chunk


def _needed(direction: Direction, microbatch: int, depth: int, depths: int) -> _Turn | None:
    """The pass whose result this one needs; its third number is the depth in the model."""
    if direction == "weights":
        return None  # its rank's own backward pass, which is before it in the order
    if direction == "forward":
        return ("forward", microbatch, depth - 1) if depth else None
    return ("backward", microbatch, depth + 1) if depth + 1 < depths else ("forward", microbatch, depth)
