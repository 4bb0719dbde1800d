"""The wire over which ranks learn at once that one of them is in trouble.

Each rank keeps one connection to a hub in rank 0's process. The kernel closes a dead process's connections, so a rank
that is killed, even with SIGKILL, is noticed in milliseconds, whatever the others are doing and without any polling.
The hub hears all reports, so the first cause is a fact and not a race: it tells everybody the same verdict.

    rank -> hub    hello, failed, goodbye; here, still (see `watching`); stop, next (see `agreement`)
    hub -> rank    noted or refused, welcome, abort or farewell; ask, noted; next, stop
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import final

from headway.dist.control.channel import Channel, UntrustedPeer, Message
from headway.dist.control.hang_watch import Watch
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.roster import RankInfo, seats

_ECHO_GRACE = 1.0
"""A rank that lost its peer reports "connection closed" in the same moment in which the real cause is on its way."""
_EXIT_GRACE = 1.0
"""How long the hub lets the others say their line before it says the last one."""
_WORD_EVERY = 10.0
"""How often people are told for whom everybody waits."""


@final
class Hub(threading.Thread):
    """Rank 0's switchboard. Runs as a daemon thread until everybody has left or something failed.

    `welcome` is what every rank is told once all are here. `on_verdict` gets the first cause of a failure, before
    anybody is told; `on_end` is called when all others are down, and does not return. `heart` is rank 0's own.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        world_size: int,
        *,
        welcome: Mapping[str, object],
        on_verdict: Callable[[FailureRecord], object],
        on_end: Callable[[FailureRecord], None],
        heart: Heartbeat | None = None,
    ) -> None:
        super().__init__(name="headway hub", daemon=True)
        self._listener = listener
        self._key = key
        self._world_size = world_size
        self._welcome = welcome
        self._on_verdict = on_verdict
        self._on_end = on_end
        self._members: dict[int, RankInfo] = {}
        self._channels: dict[int, Channel] = {}
        self._left: set[int] = set()
        self._stop_round = 0
        self._stop_why: str | None = None  # somebody asked for a stop, and the ranks say how far they are
        self._next_points: dict[int, int] = {}
        self._echo: FailureRecord | None = None
        self._echo_deadline = 0.0
        self._next_word = time.monotonic() + _WORD_EVERY
        self._watch = Watch(heart=heart or Heartbeat(), ask=self._ask)
        self.everybody_left = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(self._world_size) if rank not in self._members]

    def run(self) -> None:
        while not self.everybody_left.is_set():
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            if self._echo and time.monotonic() >= self._echo_deadline:
                self._broadcast_abort(self._attribute_to_early_leaver(self._echo))
            self._look_for_hangs()
        self._selector.close()
        self.close()

    def _patience(self) -> float | None:
        """How long nothing needs to be done unless somebody speaks."""
        if self._echo is not None:
            return max(0.0, self._echo_deadline - time.monotonic())
        absent = self.missing()
        if not absent:
            return self._watch.patience()
        if time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + _WORD_EVERY
            shown = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
            here = self._world_size - len(absent)
            print(
                f"headway: {here} of {self._world_size} ranks are here; waiting for {shown}",
                file=sys.stderr,
                flush=True,
            )
        return self._next_word - time.monotonic()

    def close(self) -> None:
        """Closes every connection; in a forked child, only the child's copies of them."""
        self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        try:
            channel = Channel(sock, self._key, calling=False)
        except OSError:  # gone already
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, _Connection(channel))

    def _read(self, caller: _Connection) -> None:
        try:
            chunk = caller.channel.socket.recv(65536)
            caller.channel.feed(chunk)
            for message in caller.channel.take():
                self._hear(caller, message)
        except (OSError, UntrustedPeer):
            chunk = b""
        if not chunk:
            self._selector.unregister(caller.channel.socket)
            caller.channel.close()
            self._on_disconnect(caller)

    def _hear(self, caller: _Connection, message: Message) -> None:
        if message["type"] == "hello":
            self._enter(caller, RankInfo(**message["member"]))
        elif message["type"] == "failed":
            self._judge(message["record"])
        elif message["type"] == "stop" and message["round"] == self._stop_round and self._stop_why is None:
            self._stop_why, self._next_points = message["why"], {}
            for channel in self._channels.values():
                channel.offer({"type": "next"})
        elif message["type"] == "next":
            assert caller.rank is not None
            self._next_points[caller.rank] = message["point"]
            self._decide_stop()
        elif message["type"] == "goodbye":
            assert caller.rank is not None
            self._left.add(caller.rank)
            self._decide_stop()
            if len(self._left) == self._world_size:
                for channel in self._channels.values():
                    channel.offer({"type": "farewell"})
                self.everybody_left.set()
        elif message["type"] == "here":
            assert caller.rank is not None
            self._watch.hear(caller.rank, message)
        elif message["type"] == "still":
            caller.channel.send({"type": "noted"})

    def _look_for_hangs(self) -> None:
        if self.missing() or self._echo is not None:
            return
        here = [member for rank, member in sorted(self._members.items()) if rank not in self._left]
        record = self._watch.look(here, self._world_size) if here else None
        if record is not None:
            self._broadcast_abort(record)

    def _ask(self, stacks: bool) -> None:
        for rank, channel in self._channels.items():
            if rank not in self._left:
                channel.offer({"type": "ask", "stacks": stacks})

    def _decide_stop(self) -> None:
        """Once all have said which point comes next for them, the latest is it."""
        if self._stop_why is None or not self._left.union(self._next_points).issuperset(self._channels):
            return
        word = {"type": "stop", "point": max(self._next_points.values(), default=0), "why": self._stop_why}
        self._stop_why, self._stop_round = None, self._stop_round + 1
        for channel in self._channels.values():
            channel.offer(word)

    def _enter(self, caller: _Connection, member: RankInfo) -> None:
        twin = self._members.get(member.rank)
        if twin is not None:
            both = f"{twin.host} pid {twin.pid} and {member.host} pid {member.pid}"
            why = f"two processes say they are rank {member.rank}: {both}"
            caller.channel.send({"type": "refused", "why": why})
            return
        caller.rank = member.rank
        caller.channel.send({"type": "noted"})
        self._channels[member.rank] = caller.channel
        self._members[member.rank] = member
        if len(self._members) == self._world_size:
            self._welcome_all()

    def _welcome_all(self) -> None:
        """All are here: nobody else is expected, so the port closes, and everybody hears where it sits."""
        self._selector.unregister(self._listener)
        self._listener.close()
        root = asdict(self._members[0])
        for rank, seat in enumerate(seats([self._members[rank] for rank in range(self._world_size)])):
            welcome = {"type": "welcome", "seat": asdict(seat), "root": root, **self._welcome}
            self._channels[rank].offer(welcome)

    def _on_disconnect(self, caller: _Connection) -> None:
        if caller.rank is None or caller.rank in self._left:
            return
        self._channels.pop(caller.rank, None)
        self._judge(vanished(self._members[caller.rank]))

    def _judge(self, record: FailureRecord) -> None:
        if not record["echo"]:
            self._broadcast_abort(record)
        elif self._echo is None:
            self._echo = record
            self._echo_deadline = time.monotonic() + _ECHO_GRACE

    def _attribute_to_early_leaver(self, record: FailureRecord) -> FailureRecord:
        """A lost connection, and nobody died: somebody's script ended while others still needed it."""
        if not self._left:
            return record
        early = self._members[min(self._left)]
        waiting = f"rank {record['rank']} still needed it in {record['phase']}"
        return vanished(early) | {
            "kind": "left",
            "error": f"ended early (it returned, or called sys.exit) while {waiting}",
            "hint": None,
        }

    def _broadcast_abort(self, record: FailureRecord) -> None:
        """Tells everybody, lets them go first, and goes last: so the cause is the last thing on the screen."""
        self._on_verdict(record)
        others = [channel for rank, channel in self._channels.items() if rank != 0]
        for channel in others:
            channel.offer({"type": "abort", "record": record})
        deadline = time.monotonic() + _EXIT_GRACE
        for channel in others:
            _wait_for_end(channel, deadline)
        self._on_end(record)


@final
class _Connection:
    """A connection, and the rank at its other end once it has said so."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank: int | None = None


def vanished(member: RankInfo) -> FailureRecord:
    """The record of a rank that can no longer speak for itself."""
    return {
        "kind": "vanished",
        "rank": member.rank,
        "host": member.host,
        "pid": member.pid,
        "error": "died without a word",
        "hint": "killed (kill -9, out of memory), crashed in native code, or left by os._exit",
        "traceback": None,
        "exit_code": 1,
        "echo": False,
    }


def _wait_for_end(channel: Channel, deadline: float) -> None:
    try:
        while channel.receive(max(0.0, deadline - time.monotonic())) is not None:
            pass
    except (OSError, UntrustedPeer):  # time is up, or it is gone: either way there is nothing to wait for
        pass
