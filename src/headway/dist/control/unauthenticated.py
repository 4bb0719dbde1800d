"""Connections whose other end has not yet proved that it has the key of the launch.

Every user of the network can connect to an open port, and keep the connection. A rank or an agent sends a signed
message at once. Every other connection costs this process an open file, which it may need: so their number and their
time are limited.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import final

from headway.dist.control.channel import Channel

_PROOF_S = 30.0
"""how long a connection may take to prove that it has the key; a busy node needs seconds"""
_MIN_CONNECTIONS = 128
_CROWDED_S = 0.05
"""how long to wait at the limit of open files before a connection in the queue is accepted"""


@final
class UnauthenticatedConnections:
    """The connections of one port that have not sent a signed message, the oldest first; `expected` of them will.

    >>> connections = UnauthenticatedConnections(expected=8)
    >>> channel = connections.accept(listener, key)
    >>> connections.trust(channel)  # it has sent a message that is signed
    >>> for channel in connections.overdue():
    ...     channel.close()
    """

    def __init__(self, *, expected: int, proof_s: float = _PROOF_S) -> None:
        self._most = max(_MIN_CONNECTIONS, expected)
        self._proof_s = proof_s
        self._since: dict[Channel, float] = {}
        self._surplus = 0

    def accept(self, listener: socket.socket, key: bytes) -> Channel | None:
        """Accepts a connection; None if it is closed already, or at the limit of open files."""
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._surplus = len(self._since) // 2 + 1
                time.sleep(_CROWDED_S)
            return None
        try:
            channel = Channel(sock, key, is_client=False)
        except OSError:
            sock.close()
            return None
        self._since[channel] = time.monotonic()
        return channel

    def trust(self, channel: Channel) -> None:
        """Removes a connection that has the key, or is closed."""
        self._since.pop(channel, None)

    def close(self) -> None:
        """Closes all of them; in a forked child, only the child's copies."""
        for channel in list(self._since):
            channel.close()

    def overdue(self) -> list[Channel]:
        """Removes and returns the connections that are too many or too old: the caller closes them."""
        surplus = max(self._surplus, len(self._since) - self._most)
        self._surplus = 0
        found = []
        for number, (channel, since) in enumerate(self._since.items()):
            if number >= surplus and time.monotonic() - since <= self._proof_s:
                break
            found.append(channel)
        for channel in found:
            self.trust(channel)
        return found
