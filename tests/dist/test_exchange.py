"""The one exchange between ranks: all succeed, or all raise what one of them raised, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d
import warm

import headway as hw
from headway.dist.collective.exchange import RankExchange, gather_rows, rank_and_size
from headway.dist.failure.remote import RemoteTraceback
from headway.errors import BarrierTimeout, UsageError
from headway.testing import ranks


@ranks(3)
def test_rank_0_decides_and_each_rank_gets_its_own_answer() -> None:
    exchange = RankExchange("count")
    for offset in range(5):
        answer = exchange.round(
            lambda offset=offset: hw.rank() + offset, lambda found: [sum(found) * 10 + r for r in range(3)]
        )
        assert answer == (3 + 3 * offset) * 10 + hw.rank()


@ranks(3)
def test_every_rank_gets_all_results_in_the_order_of_ranks() -> None:
    assert RankExchange("count").all_gather(lambda: {"rank": hw.rank()}) == [{"rank": r} for r in range(3)]


@ranks(3)
def test_what_one_rank_raises_all_raise_and_nothing_is_decided() -> None:
    decided, undone = [], []

    def work() -> int:
        if hw.rank() == 2:
            raise FileNotFoundError(2, "No such file or directory", "/data/x")
        return 0

    with pytest.raises(FileNotFoundError) as caught:
        RankExchange("read").round(work, lambda found: decided.append(1) or found, lambda: undone.append(1))
    assert caught.value.filename == "/data/x"
    assert decided == []
    assert undone == ([1] if hw.rank() == 0 else [])
    if hw.rank() != 2:
        assert isinstance(caught.value.__cause__, RemoteTraceback)


@ranks(2)
def test_what_rank_0_raises_when_it_decides_all_raise() -> None:
    def decide(found: list[int]) -> list[int]:
        raise UsageError(f"cannot decide about {found}")

    with pytest.raises(UsageError, match=r"cannot decide about \[0, 1\]"):
        RankExchange("decide").round(hw.rank, decide)
    with pytest.raises(UsageError, match="on the root"):
        RankExchange("decide").from_root(lambda: (_ for _ in ()).throw(UsageError("on the root")))


@ranks(3)
def test_a_rank_that_does_not_come_is_named_on_all_ranks() -> None:
    hw.barrier()  # all are there: on a busy machine one of the others could be late, too
    exchange = RankExchange("agree on a name", timeout_s=2.0)
    if hw.rank() == 2:
        time.sleep(4)
    message = "rank 2 did not respond within 2 s while the ranks tried to agree on a name"
    with pytest.raises(BarrierTimeout, match=message):
        exchange.all_gather(lambda: None)


@ranks(3)
def test_what_one_rank_publishes_others_read_and_it_waits_for_nobody() -> None:
    for number in range(10):
        exchange = RankExchange("publish", channel="test")
        if hw.rank() == 1:
            exchange.publish({"number": number}, readers=2)
        else:
            assert exchange.read(readers=2) == {"number": number}
    exchange = RankExchange("publish", channel="test")
    if hw.rank() == 1:
        exchange.publish(error=KeyError("gone"), readers=2)
    else:
        with pytest.raises(KeyError, match="gone"):
            exchange.read(readers=2)


@ranks(2)
def test_no_keys_stay_in_the_store() -> None:
    store = hw.dist.group.current().store
    hw.barrier()
    before = store.num_keys()
    for _ in range(10):
        RankExchange("count").all_gather(hw.rank)
    hw.barrier()
    assert abs(store.num_keys() - before) <= 5


@ranks(2)
def test_no_collective_takes_part() -> None:
    """Ranks use it from a thread while the main one trains."""
    before = c10d.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    RankExchange("count").all_gather(hw.rank)
    assert c10d.group.WORLD._get_sequence_number_for_group() == before  # type: ignore[union-attr]


@ranks(3)
def test_rows_of_numbers_come_from_all_ranks() -> None:
    assert gather_rows(torch.full((2,), float(hw.rank()))).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_alone_nothing_is_sent() -> None:
    assert rank_and_size() == (0, 1)
    exchange = RankExchange("count")
    assert exchange.all_gather(lambda: 7) == [7]
    assert exchange.from_root(lambda: 7) == 7
    assert gather_rows(torch.ones(2)).tolist() == [[1.0, 1.0]]
    undone: list[int] = []
    with pytest.raises(UsageError):
        exchange.from_root(lambda: (_ for _ in ()).throw(UsageError("no")), lambda: undone.append(1))
    assert undone == [1]


PLAIN = """
import sys
import torch.distributed as td
from headway.dist.collective.exchange import RankExchange
from headway.errors import UsageError
rank, store = int(sys.argv[1]), td.FileStore(sys.argv[2], 2)
td.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(3):
    assert RankExchange("count", store=store).all_gather(td.get_rank) == [0, 1]
try:
    RankExchange("count")
except UsageError as error:
    print(error)
"""


def test_in_a_group_of_torchs_own_it_needs_a_store(tmp_path: Path) -> None:
    started = [
        warm.Popen(
            [sys.executable, "-c", PLAIN, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        assert "call headway.init() first" in process.communicate(timeout=120)[0]
