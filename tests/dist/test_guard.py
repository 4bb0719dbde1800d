"""Root-only work: when the working rank raises, nobody waits in vain."""

from __future__ import annotations

import json
import time

import pytest
from waiting import check_duration

import headway as hw
from headway.dist.collective.guard import from_root
from headway.dist.failure.remote import RemoteTraceback
from headway.errors import BarrierTimeout, UsageError
from headway.testing import ranks


@ranks(3)
def test_root_goes_first() -> None:
    order = hw.dist.store()
    with hw.root_first():
        mine = order.add("turn", 1)
    assert (mine == 1) == hw.is_root()


@pytest.mark.alone
@ranks(3)
def test_what_root_raises_all_raise_with_its_traceback() -> None:
    def download() -> None:
        time.sleep(0.2 if hw.is_root() else 0)
        hw.dist.store().set("raised", str(time.time()))
        raise FileNotFoundError(2, "No such file or directory", "/data/mnist")

    with pytest.raises(FileNotFoundError) as caught, hw.root_first():
        download()
    caught_at = time.time()
    assert caught.value.filename == "/data/mnist"
    if not hw.is_root():
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in download" in str(caught.value.__cause__)
        check_duration(caught_at - float(hw.dist.store().get("raised")), 1, "all ranks had raised it")


@ranks(3)
def test_local_root_first_with_all_ranks_on_one_node() -> None:
    order = hw.dist.store()
    with hw.local_root_first():
        mine = order.add("local turn", 1)
    assert (mine == 1) == (hw.local_rank() == 0)


@ranks(2)
def test_root_only_runs_once_and_others_wait() -> None:
    store = hw.dist.store()

    @hw.root_only
    def count(by: int) -> int:
        time.sleep(0.1)
        return int(store.add("runs", by))

    result = count(1)
    assert result == (1 if hw.is_root() else None)
    assert store.add("runs", 0) == 1, "the others went on only when it was done"


@ranks(2)
def test_root_only_raises_everywhere() -> None:
    class LocalError(Exception):
        pass

    @hw.root_only
    def fail() -> None:
        raise json.JSONDecodeError("bad", "doc", 1)

    @hw.root_only
    def fail_with_a_class_nobody_can_import() -> None:
        raise LocalError("only here")

    with pytest.raises(json.JSONDecodeError if hw.is_root() else ValueError):
        fail()
    with pytest.raises(LocalError if hw.is_root() else hw.errors.RankFailure, match="only here"):
        fail_with_a_class_nobody_can_import()


@ranks(2)
def test_root_only_without_waiting_may_be_called_anywhere() -> None:
    @hw.root_only(wait=False)
    def note() -> str:
        return "noted"

    if hw.is_root():
        assert note() == "noted"  # no other rank calls it
    hw.barrier()


@ranks(2)
def test_from_root_gives_the_value_and_leaves_no_keys() -> None:
    before = hw.dist.group.current().store.num_keys()
    hw.barrier()
    for number in range(20):
        assert from_root(lambda number=number: {"n": number}) == {"n": number}
    hw.barrier()
    assert abs(hw.dist.group.current().store.num_keys() - before) <= 5, "keys are tidied up"


@ranks(3)
def test_a_barrier_names_those_who_do_not_come() -> None:
    hw.barrier()  # all are there: on a busy machine one of the others could be late, too
    if hw.rank() == 2:
        time.sleep(4)
        hw.barrier()  # too late for the others, but every rank must come as often as the rest
    else:
        with pytest.raises(BarrierTimeout, match=r"within 2 s by rank 2"):
            hw.barrier(timeout=2)


@ranks(3)
def test_barriers_hold_everybody() -> None:
    for _ in range(10):
        hw.dist.store().add("arrived", 1)
        hw.barrier()
        assert hw.dist.store().add("arrived", 0) % 3 == 0
        hw.barrier()


@ranks(3)
def test_objects_travel() -> None:
    rank = hw.rank()
    assert hw.broadcast_object({"from": rank}, source=2) == {"from": 2}
    assert hw.all_gather_object(rank * 10) == [0, 10, 20]
    assert hw.gather_object((rank,), destination=1) == ([(0,), (1,), (2,)] if rank == 1 else None)
    with pytest.raises(UsageError, match="rank 3 does not exist: the ranks are 0 to 2"):
        hw.broadcast_object(None, source=3)


@ranks(1)
def test_alone_everything_works() -> None:
    hw.barrier()
    assert hw.broadcast_object(1) == 1
    assert hw.all_gather_object(1) == [1]
    with hw.root_first(), hw.local_root_first():
        pass
    assert hw.root_only(lambda: 7)() == 7


def test_before_init_the_next_step_is_named() -> None:
    with pytest.raises(UsageError, match=r"call headway.init\(\) first"):
        hw.rank()
