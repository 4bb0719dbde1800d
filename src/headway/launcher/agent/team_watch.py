"""Heartbeats between agents: a node that is lost or hangs closes no connection and writes no record.

Every agent sends agent 0 a message every few seconds, over a signed channel, and agent 0 replies. So agent 0 detects
that another agent is silent, and the others detect that agent 0 is. A thread of its own does this: an agent that waits
for a file system is not silent. Agents that cannot reach each other from the start are not watched.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from functools import partial
from typing import final

from headway.dist.control.channel import Channel, UntrustedPeer, connect
from headway.dist.control.unauthenticated import UnauthenticatedConnections
from headway.dist.rendezvous import HubAddress, listen_on
from headway.system.running_clock import RunningClock

BEAT_S = 5.0
"""seconds between two messages of an agent"""
SILENT_S = 60.0
"""seconds of silence after which an agent is lost; a broken connection of a rank is detected after the same time"""


@final
class TeamWatch:
    """One agent's part in the watch; `silent` returns the agents that are overdue.

    >>> watch = TeamWatch(0, size=2, host="node1")
    >>> watch.start(watch.address)
    >>> watch.silent()
    []
    """

    def __init__(
        self, number: int, *, size: int, host: str, beat_s: float = BEAT_S, silent_s: float = SILENT_S
    ) -> None:
        self._number, self._size = number, size
        self._beat_s, self._silent_s = beat_s, silent_s
        self._last_message: dict[int, float] = {}  # agent -> when its last message arrived
        self._unauthenticated = UnauthenticatedConnections(expected=size)
        self._clock = RunningClock(longest_s=silent_s / 10)
        self._ended = threading.Event()
        self._listener: socket.socket | None = None
        self.address: HubAddress | None = None
        """where agent 0 listens"""
        if number == 0:
            self._listener, hosts = listen_on(host)
            port = self._listener.getsockname()[1]
            self.address = HubAddress(hosts=hosts, port=port, key=secrets.token_bytes(32))

    def start(self, address: HubAddress) -> None:
        """Begins to watch; `address` is where agent 0 listens."""
        listener, self._listener = self._listener, None  # the thread owns it from now on
        task = partial(self._serve, listener, address.key) if listener else partial(self._report, address)
        threading.Thread(target=task, name="headway team", daemon=True).start()

    def silent(self) -> list[int]:
        """Returns the agents whose messages have stopped; they may have ended without a failure."""
        self._clock.tick()
        last = list(self._last_message.items())
        return sorted(number for number, at in last if self._clock.since(at) > self._silent_s)

    def forget(self, number: int) -> None:
        """Stops watching an agent whose ranks have ended, until its next message."""
        self._last_message.pop(number, None)

    def close(self) -> None:
        """Ends the watch of this agent."""
        self._ended.set()
        if self._listener is not None:  # the watch has not begun
            self._listener.close()

    def _report(self, address: HubAddress) -> None:
        channel: Channel | None = None
        while not self._ended.wait(self._beat_s if self._last_message else min(1.0, self._beat_s)):
            try:
                channel = channel or self._connect(address)
                channel.send({"agent": self._number})
                if channel.receive(self._beat_s) is None:
                    raise ConnectionError("closed")
                self._last_message[0] = time.monotonic()
            except (OSError, UntrustedPeer):
                if channel is not None:
                    channel.close()
                channel = None
        if channel is not None:
            channel.close()

    def _connect(self, address: HubAddress) -> Channel:
        for host in address.hosts[:-1]:
            try:
                return connect(host, address.port, address.key, timeout=self._beat_s)
            except (OSError, UntrustedPeer):
                continue
        return connect(address.hosts[-1], address.port, address.key, timeout=self._beat_s)

    def _serve(self, listener: socket.socket, key: bytes) -> None:
        with selectors.DefaultSelector() as selector, listener:
            selector.register(listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                for found, _ in selector.select(self._beat_s):
                    if found.fileobj is listener:
                        self._accept(listener, selector, key)
                    elif not self._answer(found.data):
                        self._drop(found.data, selector)
                for channel in self._unauthenticated.overdue():
                    self._drop(channel, selector)
            for found in list(selector.get_map().values()):
                if isinstance(found.data, Channel):
                    found.data.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector, key: bytes) -> None:
        channel = self._unauthenticated.accept(listener, key)
        if channel is not None:
            channel.socket.settimeout(self._beat_s)
            selector.register(channel.socket, selectors.EVENT_READ, channel)

    def _drop(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        selector.unregister(channel.socket)
        self._unauthenticated.trust(channel)
        channel.close()

    def _answer(self, channel: Channel) -> bool:
        """Replies to an agent's messages; returns whether the connection is still open."""
        try:
            chunk = channel.socket.recv(65536)
            channel.feed(chunk)
            for message in channel.messages():
                self._unauthenticated.trust(channel)
                self._last_message[int(message["agent"])] = time.monotonic()
                channel.send({"agent": 0})
        except (OSError, UntrustedPeer):
            return False
        return bool(chunk)
