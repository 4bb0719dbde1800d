"""Connections whose other end has not shown yet that it knows the key of the launch.

Every user of the network can connect to an open port, and keep that connection. Who knows the key signs a message at
once. The others cost this process a file each, which it may need for something else: so they are few, and not for long.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import final

from headway.dist.control.channel import Channel

PATIENCE_S = 30.0
"""how long a connection may take to show that it knows the key; a busy node needs seconds"""
_LEAST = 128
_CROWDED_S = 0.05
"""a connection for which there is no file stays in the queue: how long until it is tried again"""


@final
class Strangers:
    """The connections of one port that nobody vouches for yet, the oldest first; `expected` are to come.

    >>> strangers = Strangers(expected=8)
    >>> channel = strangers.accept(listener, key)
    >>> strangers.trust(channel)  # it has sent a message that is signed
    >>> for channel in strangers.overdue():
    ...     channel.close()
    """

    def __init__(self, *, expected: int, patience_s: float = PATIENCE_S) -> None:
        self._most = max(_LEAST, expected)
        self._patience_s = patience_s
        self._since: dict[Channel, float] = {}
        self._surplus = 0

    def accept(self, listener: socket.socket, key: bytes) -> Channel | None:
        """Accepts a connection; None if it is gone already, or if there is no file for it."""
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
        """Counts a connection no longer: it knows the key, or is closed."""
        self._since.pop(channel, None)

    def close(self) -> None:
        """Closes all of them; in a forked child, only the child's copies."""
        for channel in list(self._since):
            channel.close()

    def overdue(self) -> list[Channel]:
        """Returns those that are too many or too old, and counts them no longer: the caller closes them."""
        surplus = max(self._surplus, len(self._since) - self._most)
        self._surplus = 0
        found = []
        for number, (channel, since) in enumerate(self._since.items()):
            if number >= surplus and time.monotonic() - since <= self._patience_s:
                break
            found.append(channel)
        for channel in found:
            self.trust(channel)
        return found
