"""How many bad samples are too many: a share of all, over all ranks, and neither chance nor one damaged shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from headway.data import quarantine as quarantine_module
from headway.data.quarantine import Quarantine, QuarantinedSample
from headway.errors import HeadwayError

SHARD = 1000  # samples


def bad(number: int) -> QuarantinedSample:
    return QuarantinedSample("data", f"/{number // SHARD}.tar", f"{number}", "broken")


def stops(
    numbers: Sequence[int], seen: int, *, share: float = 0.001, epoch: int = 10**6, seen_by_all: int = 0
) -> bool:
    quarantine = Quarantine(share, epoch)
    quarantine.add(map(bad, numbers))
    try:
        quarantine.check(seen, max(seen, seen_by_all))
    except HeadwayError:
        return True
    return False


def test_half_the_share_stops_no_rank_of_64() -> None:
    """It did: with one sample of slack on each rank, 32 bad ones of 64,000 stopped eight ranks."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        ranks = np.split(random.permutation(64_000), 64)
        chosen = {*random.choice(64_000, 32, replace=False).tolist()}
        for rank in ranks:
            found = [at for at, number in enumerate(rank.tolist()) if number in chosen]
            for count in range(1, len(found) + 1):  # each at the moment when it is met
                assert not stops(
                    rank[found[:count]].tolist(), found[count - 1] + 1, seen_by_all=64 * found[count - 1]
                )


def test_ten_times_the_share_stops_soon() -> None:
    """Each bad sample at the moment when it is met, in one stream of samples."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        shards = random.permutation(1000)[:24] * SHARD  # as many as are read side by side
        met = np.flatnonzero(random.random(20_000) < 0.01)
        numbers = random.choice(shards, len(met)) + random.integers(SHARD, size=len(met))
        ends = [int(at) for count, at in enumerate(met, 1) if stops(numbers[:count].tolist(), int(at) + 1)]
        assert ends and ends[0] < 5000


@pytest.mark.parametrize(
    ("numbers", "seen", "stopped"),
    [
        (range(1000), 24_000, False),  # one damaged shard of a thousand, in the first lane
        (range(1001), 24_000, True),  # more than an epoch may have
        (range(0, 1000 * SHARD, SHARD), 900_000, False),  # one in each shard, in two epochs of all ranks
        (range(0, 24 * SHARD, SHARD), 1000, True),
    ],
)
def test_a_damaged_shard_is_one_event(numbers: Sequence[int], seen: int, stopped: bool) -> None:
    assert stops(numbers, seen) is stopped


def test_zero_means_none_and_one_means_all() -> None:
    assert stops([5], 10**6, share=0)
    assert not stops([], 10**6, share=0)
    assert not stops([5], 1, share=1e-9), "one is chance"
    assert not stops(range(500), 500, share=1, epoch=500)


@pytest.mark.parametrize(
    ("seen", "stopped"), [((1000, 3000), False), ((3000, 1000), False), ((1000, 1100), True)]
)
def test_ranks_that_have_seen_different_numbers_decide_alike(
    seen: tuple[int, int], stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did not: with a limit of batches, one rank asked the others, who had gone on."""
    meeting, rows = Barrier(2), list[Any]()

    class Exchange:
        def __init__(self, _: str) -> None:
            pass

        def all_gather(self, value: Callable[[], Any]) -> list[Any]:
            rows.append(value())
            meeting.wait(timeout=30)
            return rows

    def rank(number: int) -> bool:
        quarantine = Quarantine(0.001, 10**6)
        quarantine.add([bad((2 * shard + number) * SHARD) for shard in range(5)])
        try:
            quarantine.check_all_ranks(10, seen[number], number)
        except HeadwayError:
            return True
        return False

    monkeypatch.setattr(quarantine_module, "RankExchange", Exchange)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(rank, range(2))] == [stopped, stopped]
    assert len(rows) == 2
