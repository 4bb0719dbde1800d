"""All ranks stop at one point: however far apart they are, whoever asks, and however often."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import headway as hw
from headway import dist
from headway.dist.control.agreement import Agreement
from headway.dist.group import current
from headway.system.retries import stop_requested
from headway.testing import ranks


def test_nobody_asks_nobody_stops() -> None:
    agreement = Agreement()
    assert [agreement.pass_point() for _ in range(1000)] == [None] * 1000


def test_the_point_is_beyond_what_any_rank_has_passed() -> None:
    """Threads for ranks, at different paces; the word travels late. No rank is ever told of a point behind it."""
    for seed in range(20):
        chance = random.Random(seed)
        members = [Agreement() for _ in range(4)]
        stops: list[int] = [0] * 4

        def walk(
            number: int, pace: float, members: list[Agreement] = members, stops: list[int] = stops
        ) -> None:
            for point in range(1, 100_000):
                time.sleep(pace)
                if members[number].pass_point() is not None:
                    stops[number] = point
                    return

        paces = [chance.choice([0.0, 0.0001, 0.001]) for _ in members]
        threads = [threading.Thread(target=walk, args=(n, pace)) for n, pace in enumerate(paces)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.01)
        points = []
        for member in chance.sample(members, k=4):
            points.append(member.propose())
            time.sleep(chance.random() * 0.002)
        for member in chance.sample(members, k=4):
            member.decide(max(points), "enough")
            time.sleep(chance.random() * 0.002)
        for thread in threads:
            thread.join(60)
        assert stops == [max(points)] * 4, seed


def test_the_next_point_is_known_to_be_the_one() -> None:
    agreement = Agreement()
    point = agreement.propose()
    assert not agreement.decided and not agreement.acts_next
    agreement.decide(point + 1, "enough")
    assert agreement.decided and not agreement.acts_next
    assert agreement.pass_point() is None
    assert agreement.acts_next
    assert agreement.pass_point() == "enough"


@ranks(3)
def test_ranks_that_drift_apart_stop_at_the_same_point(tmp_path: Path) -> None:  # noqa: ARG001
    """No collective holds them together; all of them ask, more than once, at different times."""
    for turn in range(3):
        agreement = current().agreement
        agreement.begin()
        hw.barrier()
        pace = [0.0, 0.0005, 0.003][(hw.rank() + turn) % 3]
        passed = 0
        while True:
            time.sleep(pace)
            passed += 1
            if passed in (20 + 7 * hw.rank(), 30):
                current().request_stop(f"rank {hw.rank()}")
            why = agreement.pass_point()
            if why is not None:
                break
        points = hw.all_gather_object(passed)
        assert len(set(points)) == 1, points
        assert passed >= 20
        assert len(set(hw.all_gather_object(why))) == 1, "the first to ask is named by all"
        assert dist.is_initialized()
        assert stop_requested.is_set(), "reads that wait for their next try hurry, whoever has asked"
        stop_requested.clear()
