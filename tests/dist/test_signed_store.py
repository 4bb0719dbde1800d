"""What a stranger writes into the store, or into a connection between ranks, is refused before it is used."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import headway as hw
from headway.dist.collective.exchange import RankExchange
from headway.dist.group import current
from headway.dist.rendezvous import HubAddress, StoreRendezvous
from headway.dist.signed_store import SignedStore, verify
from headway.errors import RankFailure, UsageError
from headway.testing import ranks

KEY = b"k" * 32


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def test_a_signed_store_is_a_store() -> None:
    signed = SignedStore(c10d.HashStore(), KEY)
    for store in (signed, c10d.PrefixStore("p", signed)):
        store.set("a", "1")
        store.set("b", b"\x00\xff" if store is signed else "x")
        assert store.get("a") == b"1"
        assert [store.add("n", 2), store.add("n", 1)] == [2, 3]
        assert store.check(["a"]) and not store.check(["none"])
        store.wait(["a", "b"], timedelta(seconds=1))
        assert store.compare_set("c", "", "new") == b"new"
        assert store.compare_set("c", "other", "no") == b"new" == store.compare_set("c", "new", "new")
        before = store.num_keys()
        assert store.delete_key("c") and store.num_keys() == before - 1
    signed.wait(["a"])
    with pytest.raises(RuntimeError):
        signed.wait(["none"], timedelta(seconds=0.01))


def test_values_of_others_are_refused() -> None:
    raw = c10d.HashStore()
    store = SignedStore(raw, KEY)
    store.set("own", "value")
    raw.set("bare", "value")
    raw.set("short", "v")
    raw.set("copied", raw.get("own"))
    SignedStore(raw, b"x" * 32).set("other", "value")
    for name in ("bare", "short", "copied", "other"):
        with pytest.raises(
            RankFailure, match=f"the value of '{name}' in the store was not written by a rank"
        ):
            store.get(name)
        with pytest.raises(RankFailure, match=f"'p/{name}'"):
            raw.set(f"p/{name}", raw.get(name))
            c10d.PrefixStore("p", store).get(name)


def test_add_to_a_value_is_refused_and_the_connection_stays() -> None:
    tcp = c10d.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    signed = SignedStore(tcp, KEY)
    for store in (signed, c10d.PrefixStore("p", signed)):
        store.set("m", "0")
        with pytest.raises(UsageError, match=r"add\('(p/)?m'\): the store has a value of that name"):
            store.add("m", 1)
        assert store.get("m") == b"0" and store.add("n", 1) == 1
        store.delete_key("m")
        assert store.add("m", 1) == 1


def test_get_of_a_counter_says_how_to_read_it() -> None:
    signed = SignedStore(c10d.HashStore(), KEY)
    for store in (signed, c10d.PrefixStore("p", signed)):
        for count in (1, -2):
            store.add("n", count)
            with pytest.raises(
                UsageError, match=r"n' in the store is a number .* read it with add\(name, 0\)"
            ):
                store.get("n")
        assert store.add("n", 0) == -1


@ranks(2)
def test_a_stranger_at_the_port_of_the_store(tmp_path: Path) -> None:
    me, store = hw.rank(), hw.dist.store()
    stranger = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    group = c10d.new_group([0, 1])
    keys = [key for key in stranger.list_keys() if "c10d" in key]  # type: ignore[attr-defined]
    assert len(keys) >= 4, "the addresses of two ranks in two groups"
    for key in keys:
        assert verify(current().key, f"the value of {key!r} in the store", stranger.get(key))

    c10d.destroy_process_group(group)
    hw.barrier()
    exchange = RankExchange("be fooled")
    if me == 1:
        stranger.set("headway/user/x", "forged")
        number = current().calls["exchange"]
        stranger.set(f"headway/exchange/{number}/1/from/1", '{"value": "forged"}')
    hw.barrier()
    with pytest.raises(RankFailure, match="'headway/user/x' in the store was not written by a rank"):
        store.get("x")
    if me == 0:
        with pytest.raises(RankFailure, match="was not written by a rank"):
            exchange.all_gather(lambda: "own")

    evil = torch.frombuffer(bytearray(pickle.dumps(Bomb(tmp_path / f"executed-{me}"))), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "all_gather"):
            patch.setattr(c10d, name, _tampered(getattr(c10d, name), evil))
        value = "x" * 300 if me == 0 else None
        if me == 0:
            assert hw.broadcast_object(value) == value
        else:
            with pytest.raises(RankFailure, match=r"object \d+ of rank 0 was not written by a rank"):
                hw.broadcast_object(value)
        with pytest.raises(RankFailure, match=r"object \d+ of rank 0 was not written by a rank"):
            hw.all_gather_object("y" * 300)
    assert hw.all_gather_object(("y" * me, me)) == [("", 0), ("y", 1)]
    assert hw.gather_object(me, destination=1) == ([0, 1] if me == 1 else None)
    assert list(tmp_path.iterdir()) == []


def _tampered(collective: Any, evil: torch.Tensor) -> Any:
    """A collective whose bytes pass through a stranger's hands."""

    def call(into: Any, *args: Any, **given: Any) -> None:
        collective(into, *args, **given)
        for tensor in into if isinstance(into, list) else [into]:
            if tensor.dtype == torch.uint8 and (isinstance(into, list) or hw.rank() == 1):
                tensor[: len(evil)] = evil

    return call


def test_the_key_of_a_launch_is_not_in_torchruns_store(tmp_path: Path) -> None:
    store = c10d.HashStore()
    rank0, rank1 = (StoreRendezvous(store, one_node=True) for _ in range(2))
    rank0.publish(HubAddress(hosts=("h",), port=7, key=KEY))
    assert KEY.hex().encode() not in store.get("headway/hub")
    assert rank1.find() == HubAddress(hosts=("h",), port=7, key=KEY)
    readable = tmp_path / "readable"
    readable.write_text(KEY.hex())
    store.set("headway/hub", f'{{"hosts": ["evil"], "port": 6, "key": "{readable}"}}')
    with pytest.raises(UsageError, match="can be read by others"):
        rank1.find()
    rank0.close()
    apart = StoreRendezvous(store, one_node=False)
    apart.publish(HubAddress(hosts=("h",), port=7, key=KEY))
    assert apart.find() == HubAddress(hosts=("h",), port=7, key=KEY)
