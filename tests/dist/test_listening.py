"""Ports are open where others need them, and nowhere else if that is known."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway.dist import join, rendezvous
from headway.dist.environment import LaunchEnvironment, detect
from headway.dist.group import RankGroup
from headway.dist.rendezvous import FileRendezvous, listen, listen_on, own_address
from headway.errors import RankFailure, UsageError
from headway.system.log import logger


def own_addresses() -> list[str]:
    every = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    found = [address.address for address in every if address.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]


OWN = own_addresses()


def open_at(port: int) -> set[str]:
    """The addresses at which this process listens on a port; another process may have the same port elsewhere."""
    every = psutil.Process().net_connections()
    return {each.laddr.ip for each in every if each.laddr.port == port and not each.raddr}


def fixed_port() -> int:
    """A free port below those that the kernel picks, which other processes of the suite are given at any moment."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server(("0.0.0.0", port)):
            return port


def test_a_name_that_is_one_address_of_this_host() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("203.0.113.7") is None and own_address("no-such-host.invalid") is None
    for name in (None, "localhost", "203.0.113.7"):
        before = own_addresses()
        server, names = listen_on(name)
        with server:
            after = own_addresses()  # networks of other processes come and go
            assert server.getsockname()[0] in ("::", "0.0.0.0"), "others may reach it anywhere"
            known = {name, socket.gethostname()} - {None}
            assert known | ({*before} & {*after}) <= {*names} <= known | {*before} | {*after}


@pytest.mark.skipif(not OWN, reason="this machine has no network")
def test_where_others_know_one_address_the_port_is_open_there_only() -> None:
    launch = LaunchEnvironment(
        launcher="srun", rank=0, world_size=4, local_rank=0, local_world_size=2, node="a", master=OWN[0]
    )
    server, names = listen(launch)
    with server:
        assert open_at(server.getsockname()[1]) == {OWN[0]} and names == (OWN[0],)


def resolve(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    """Lets names stand for addresses, as a site's DNS does."""
    ask = socket.getaddrinfo

    def answer(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [found for address in names.get(host, [host]) for found in ask(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


LAUNCHERS: dict[str, dict[str, str]] = {
    "headway": {
        "HEADWAY_RENDEZVOUS": "x",
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node-a",
        "LOCAL_WORLD_SIZE": "2",
    },
    "torchrun": {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "1",
        "LOCAL_WORLD_SIZE": "2",
    },
    "mpi": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    "mpich": {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_of_two_addresses_the_port_is_open_at_the_one_that_other_nodes_use(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses of the loopback stand for two networks of a node."""
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda _: ["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    resolve(monkeypatch, **{"node-a": ["127.0.0.2"]})
    server, names = listen(detect(LAUNCHERS[launcher]))
    with server:
        port = server.getsockname()[1]
        assert open_at(port) == {"127.0.0.2"} and names == ("node-a", "127.0.0.2")
        socket.create_connection(("127.0.0.2", port)).close()


def test_a_port_that_is_open_on_all_networks_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda _: ["127.0.0.2", "127.0.0.3"])
    resolve(monkeypatch, **{"node-b": ["127.0.0.2", "127.0.0.3"]})
    with caplog.at_level("INFO", logger="headway"):
        monkeypatch.setattr(logger, "propagate", True)
        for _ in range(2):
            server, names = listen_on("node-b")
            server.close()
    assert {"node-b", "127.0.0.2", "127.0.0.3"} <= {*names}
    (line,) = caplog.messages
    assert line.startswith(
        "node-b does not resolve to exactly one address of this host, so ports for other nodes are open on all of its"
    )


@pytest.mark.skipif(not OWN, reason="this machine has no network")
def test_a_name_of_this_host_is_one_address_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda _: [*OWN, "192.0.2.9", "2001:db8::9"])
    resolve(monkeypatch, one=OWN[:1], both=["2001:db8::9", OWN[0]], new=["2001:db8::9"], debian=["127.0.1.1"])
    assert own_address("one") == own_address("both") == OWN[0] and own_address("new") == "2001:db8::9"
    resolve(monkeypatch, twice=[OWN[0], f"::ffff:{OWN[0]}"])
    assert own_address("twice") == OWN[0], "the same address, written as one of IPv6"
    resolve(monkeypatch, two=[OWN[0], "192.0.2.9"], other=[OWN[0], "203.0.113.7"])
    assert [own_address(name) for name in ("two", "other", "debian")] == [None] * 3, "nobody knows which"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", *OWN[:1], "one-node", "a-name", "loop"])
def test_the_store_at_the_users_master_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the host is the loopback on Debian, which other nodes cannot mean: then torch's own store is open."""
    if address == "a-name" and not OWN:
        pytest.skip("this machine has no network")
    names = {"one-node": ["127.0.0.1"], "a-name": OWN[:1], "loop": ["127.0.0.1"]}
    resolve(monkeypatch, **names)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if address == "loop":
        monkeypatch.setattr(join.c10d, "rendezvous", lambda *_, **__: iter([("torch's own", 0, 2)]))
    port = fixed_port()
    launch = LaunchEnvironment(
        launcher="srun",
        rank=0,
        world_size=2,
        local_world_size=2 if address == "one-node" else 1,
        node="a",
        store_address=f"{address}:{port}",
    )
    store = join._launchers_store(launch, 10)
    if address == "loop":
        assert store == "torch's own"
        return
    store.set("x", "1")
    assert store.get("x") == b"1"
    assert open_at(port) == {names.get(address, ["127.0.0.1" if address == "localhost" else address])[0]}


def test_rank_0_reaches_its_own_store_where_the_port_is_open_at_one_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster whose nodes have one address each: nothing of rank 0 is open at the loopback."""
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda _: ["127.0.0.2"])
    resolve(monkeypatch, **{"node-a": ["127.0.0.2"]})
    listeners: list[socket.socket] = []

    def hub(listener: socket.socket, *_: object, **__: object) -> Any:
        listeners.append(listener)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(join, "Hub", hub)
    launch = LaunchEnvironment(
        launcher="srun", rank=0, world_size=2, local_rank=0, local_world_size=1, node="a", master="node-a"
    )
    group = RankGroup(launch)
    try:
        join._open_hub(group, FileRendezvous(tmp_path / "meeting"), 5)
        group.store.set("x", "1")
        assert group.store.get("x") == b"1"
    finally:
        for listener in listeners:
            listener.close()


def chosen(rank: int, port: int) -> LaunchEnvironment:
    """The environment of a rank whose user has set MASTER_ADDR and MASTER_PORT."""
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        world_size=2,
        local_world_size=2,
        node="a",
        store_address=f"127.0.0.1:{port}",
    )


def test_a_master_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = rf"MASTER_PORT={port} cannot be opened on 127.0.0.1 \(Address already in use\)"
        with pytest.raises(UsageError, match=sentence):
            join._launchers_store(chosen(0, port), 2)


def test_a_master_address_at_which_nobody_is_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and so nobody else's, but it accepts no connection
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            RankFailure, match=rf"the ranks cannot meet at 127.0.0.1:{port} \(MASTER_ADDR, MASTER_PORT"
        ):
            join._launchers_store(chosen(1, port), 2)
