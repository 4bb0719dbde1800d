"""A stranger on the node can connect, but not speak."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from headway.dist.control.channel import Channel, Message, UntrustedPeer

KEY = b"k" * 32


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
    ):
        answering, _ = server.accept()
        with answering:
            yield caller, answering


Pair = tuple[Channel, Channel]


@pytest.fixture
def pair(sockets: tuple[socket.socket, socket.socket]) -> Pair:
    caller = Channel(sockets[0], KEY, is_client=True)
    hub = Channel(sockets[1], KEY, is_client=False)
    caller.handshake(30)
    hub.handshake(30)
    return caller, hub


def raw(channel: Channel) -> bytes:
    channel.socket.settimeout(30)
    return channel.socket.recv(1 << 16)


def test_messages_arrive_both_ways_in_order(pair: Pair) -> None:
    caller, hub = pair
    sent: list[Message] = [{"n": n, "text": "ü\n\x00" * n} for n in range(5)]
    for message in sent:
        caller.send(message)
        hub.send(message)
    assert [hub.receive(30) for _ in sent] == sent
    assert [caller.receive(30) for _ in sent] == sent


def test_the_end_of_the_connection_is_none(pair: Pair) -> None:
    caller, hub = pair
    caller.close()
    assert hub.receive(30) is None


def test_silence_is_a_timeout(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        pair[1].receive(0.05)


def test_another_key_is_no_key(sockets: tuple[socket.socket, socket.socket]) -> None:
    caller = Channel(sockets[0], b"x" * 32, is_client=True)
    hub = Channel(sockets[1], KEY, is_client=False)
    caller.handshake(30)
    caller.send({"type": "abort"})
    with pytest.raises(UntrustedPeer):
        hub.receive(30)


def test_a_message_cannot_be_played_twice(pair: Pair) -> None:
    caller, hub = pair
    caller.send({"type": "failed"})
    line = raw(hub)
    hub.feed(line + line)
    messages = hub.messages()
    assert next(messages) == {"type": "failed"}
    with pytest.raises(UntrustedPeer):
        next(messages)


def test_a_message_cannot_be_sent_back(pair: Pair) -> None:
    caller, hub = pair
    caller.send({"type": "failed"})
    caller.feed(raw(hub))
    with pytest.raises(UntrustedPeer):
        next(caller.messages())


def test_a_changed_message_is_no_message(pair: Pair) -> None:
    caller, hub = pair
    caller.send({"rank": 1})
    hub.feed(raw(hub).replace(b'{"rank":1}', b'{"rank":2}'))
    with pytest.raises(UntrustedPeer):
        next(hub.messages())


def test_garbage_does_not_fill_the_memory(pair: Pair) -> None:
    _, hub = pair
    hub.feed(b"x" * (5 << 20))
    with pytest.raises(UntrustedPeer):
        next(hub.messages())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has this limit")
def test_a_message_to_a_node_without_a_network_is_given_up_after_a_minute(pair: Pair) -> None:
    """The kernel probes a connection only while nothing is in flight; else it would try for a quarter of an hour."""
    for channel in pair:
        assert channel.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
