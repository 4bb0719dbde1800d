"""JSON messages over a socket, each signed with the key of the launch.

TCP ports on a cluster are open to every user of its nodes. A line without a valid signature ends the connection. Each
side starts with a random number that goes into all signatures, so recorded messages cannot be replayed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

Message = dict[str, Any]

_NONCE_BYTES = 16
_SILENT_S = 60
"""after this time without a sign of the other side, the kernel drops the connection"""
_PROBES = 3
_MAX_LINE_BYTES = 4 << 20  # a long traceback fits; an endless line does not fill the memory


class UntrustedPeer(Exception):
    """Raised when the other side does not have the key."""


@final
class Channel:
    """One end of a connection: of a rank with the hub, or of an agent with agent 0.

    Sending blocks until the message is out. Receiving is either by `receive`, which waits, or by `feed` and `messages`
    for a loop that waits on many sockets.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_client: bool) -> None:
        self.socket = sock
        self._key = key
        self._is_client = is_client
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._secret: bytes | None = None  # known once the other side's random number has arrived
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.trouble: OSError | None = None
        """why a message could not be sent; the kernel reports each error once, and then only that the end is reached"""
        _keep_alive(sock)
        sock.sendall(self._nonce)

    def send(self, message: Mapping[str, object]) -> None:
        body = json.dumps(message, separators=(",", ":"))
        self.socket.sendall(f"{self._sign(self._is_client, self._sent, body)} {body}\n".encode())
        self._sent += 1

    def try_send(self, message: Mapping[str, object]) -> bool:
        """Sends the message; returns whether the other side was still there."""
        try:
            self.send(message)
        except OSError as error:
            self.trouble = self.trouble or error
            return False
        return True

    def receive(self, timeout: float | None = None) -> Message | None:
        """Waits for the next message; None if the other side has closed; TimeoutError when time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            for message in self.messages():
                return message
            if not self._wait(deadline):
                return None

    def handshake(self, timeout: float) -> None:
        """Waits for the other side's random number, without which nothing can be signed."""
        deadline = time.monotonic() + timeout
        while self._secret is None:
            if not self._wait(deadline):
                raise UntrustedPeer("the other side closed the connection before it sent anything")

    def feed(self, chunk: bytes) -> None:
        """Takes bytes that a caller has read from the socket."""
        self._buffer += chunk
        if self._secret is None and len(self._buffer) >= _NONCE_BYTES:
            theirs = bytes(self._buffer[:_NONCE_BYTES])
            del self._buffer[:_NONCE_BYTES]
            both = self._nonce + theirs if self._is_client else theirs + self._nonce
            self._secret = hmac.digest(self._key, both, "sha256")

    def messages(self) -> Iterator[Message]:
        """Yields the messages that have arrived completely."""
        while self._secret is not None and (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            yield self._verify(line)
        if len(self._buffer) > _MAX_LINE_BYTES:
            raise UntrustedPeer("a line longer than any message")

    def derive_key(self, purpose: str) -> bytes:
        """Returns a key for another purpose, which all who have the channel's key can derive; neither is ever sent."""
        return hmac.digest(self._key, purpose.encode(), "sha256")

    def close(self) -> None:
        self.socket.close()

    def _wait(self, deadline: float | None) -> bool:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)
        chunk = self.socket.recv(65536)
        self.feed(chunk)
        return bool(chunk)

    def _verify(self, line: bytes) -> Message:
        signature, _, body = line.decode(errors="replace").partition(" ")
        expected = self._sign(not self._is_client, self._received, body)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            raise UntrustedPeer("wrong signature")
        self._received += 1
        message = json.loads(body)
        assert isinstance(message, dict), message  # only this launch has the key, and it sends objects
        return message

    def _sign(self, by_client: bool, number: int, body: str) -> str:
        assert self._secret is not None, "nothing can be signed before the handshake"
        return hmac.digest(self._secret, f"{by_client} {number} {body}".encode(), "sha256").hex()


def connect(host: str, port: int, key: bytes, timeout: float) -> Channel:
    """Opens a channel. A server with another key closes it at the first signed message."""
    sock = socket.create_connection((host, port), timeout)
    try:
        channel = Channel(sock, key, is_client=True)
        channel.handshake(timeout)
    except BaseException:
        sock.close()
        raise
    return channel


def _keep_alive(sock: socket.socket) -> None:
    """Probes the connection, and drops it after about a minute: a node that loses power or network closes nothing."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if "TCP_KEEPIDLE" in vars(socket):  # Linux; elsewhere the system's own times apply
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_S // 2 // _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # with a message in flight the kernel does not probe, and would resend the message for a quarter of an hour
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
