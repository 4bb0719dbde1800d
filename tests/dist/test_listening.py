"""Ports are open where others need them, and nowhere else if that is known."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from headway.dist import join
from headway.dist.environment import LaunchEnvironment
from headway.dist.rendezvous import listen, listen_on, own_address


def own_addresses() -> list[str]:
    every = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    found = [address.address for address in every if address.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]


OWN = own_addresses()


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
        assert server.getsockname()[0] == OWN[0] and names == (OWN[0],)
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", server.getsockname()[1]))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", *OWN[:1]])
def test_the_store_at_the_users_master_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launch = LaunchEnvironment(
        launcher="srun", rank=0, world_size=2, node="a", store_address=f"{address}:{port}"
    )
    store = join._launchers_store(launch, 10)
    store.set("x", "1")
    assert store.get("x") == b"1"
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.laddr.port == port and not each.raddr
    }
    assert listening == {"127.0.0.1" if address == "localhost" else address}
