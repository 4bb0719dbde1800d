"""The hub: it receives every failure, and ranks agree through it on when to stop.

Each rank keeps one connection to the hub in rank 0's process. The kernel closes the connections of a process that
exits, so a rank that is killed, even with SIGKILL, is detected in milliseconds, without polling. All reports arrive in
one place, so there is no race for which cause is the first, and all ranks get the same record of it.

With thousands of ranks the hub handles thousands of messages, so handling one must not loop over all ranks.

    rank -> hub    hello, expired, failed, goodbye; status, ping, overdue (see `hang_watch`);
                   request, next_point (see `agreement`)
    hub -> rank    ack or refused, welcome, abort or farewell; status_request, ack; next_point, decision
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import final

from headway.dist.control.agreement import SUBJECTS
from headway.dist.control.channel import Channel, Message, UntrustedPeer
from headway.dist.control.hang_watch import HangWatch
from headway.dist.control.unauthenticated import UnauthenticatedConnections
from headway.dist.failure.hang import format_ranks
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.roster import RankInfo, place_ranks
from headway.system.log import logger
from headway.system.text import shorten_list

_ECHO_GRACE_S = 1.0
"""how long a lost connection waits for the real cause, which may arrive a moment later"""
_EXIT_GRACE_S = 1.0
"""how long the hub waits for the others to exit, so that it prints last"""
_LINK_ERRORS = (
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
)
"""errors of a connection whose other end may still be alive; a process that ends closes or resets it"""
_NOTICE_EVERY_S = 10.0
"""how often the missing ranks are logged"""


@final
class Hub(threading.Thread):
    """A daemon thread of rank 0 that runs until all ranks have left or one has failed.

    `welcome` is sent to every rank once all have joined. `on_first_failure` gets the record of the first failure
    before the other ranks do; `on_all_down` is called when all others have exited, and does not return. `heartbeat` is
    rank 0's.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        world_size: int,
        *,
        welcome: Mapping[str, object],
        on_first_failure: Callable[[FailureRecord], object],
        on_all_down: Callable[[FailureRecord], None],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        super().__init__(name="headway hub", daemon=True)
        self._listener = listener
        self._key = key
        self._world_size = world_size
        self._welcome = welcome
        self._on_first_failure = on_first_failure
        self._on_all_down = on_all_down
        self._ranks: dict[int, RankInfo] = {}
        self._channels: dict[int, Channel] = {}
        self._unauthenticated = UnauthenticatedConnections(expected=world_size)
        self._left: set[int] = set()
        self._rounds = {subject: _Round() for subject in SUBJECTS}
        self._echo: FailureRecord | None = None
        self._echo_deadline = 0.0
        self._next_notice = time.monotonic() + _NOTICE_EVERY_S
        self._hang_watch = HangWatch(heartbeat=heartbeat or Heartbeat(), request_status=self._request_status)
        self.all_left = threading.Event()
        self.is_awaited = False
        """whether rank 0 has nothing left to do but to wait until all have left"""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def missing(self) -> list[int]:
        """Returns the ranks that have not joined yet."""
        return [rank for rank in range(self._world_size) if rank not in self._ranks]

    @property
    def _is_complete(self) -> bool:
        return len(self._ranks) == self._world_size

    def run(self) -> None:
        while not self.all_left.is_set():
            for key, _ in self._selector.select(self._select_timeout_s()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            for channel in self._unauthenticated.overdue():
                self._drop(channel)
            if self._echo and time.monotonic() >= self._echo_deadline:
                self._broadcast_abort(self._attribute_to_early_leaver(self._echo))
            self._check_for_hang()
        self._selector.close()
        self.close()

    def _select_timeout_s(self) -> float | None:
        """Returns how long the hub may wait for a message before it has something to do."""
        if self._echo is not None:
            return max(0.0, self._echo_deadline - time.monotonic())
        if self._is_complete:
            return self._hang_watch.timeout_s()
        if time.monotonic() >= self._next_notice:
            absent = self.missing()
            self._next_notice = time.monotonic() + _NOTICE_EVERY_S
            here = self._world_size - len(absent)
            logger.info(
                "%d of %d ranks have joined; waiting for %s", here, self._world_size, shorten_list(absent)
            )
        return self._next_notice - time.monotonic()

    def close(self) -> None:
        """Closes every connection; in a forked child, only the child's copies of them."""
        self._listener.close()
        self._unauthenticated.close()
        for channel in self._channels.values():
            channel.close()

    def _accept(self) -> None:
        channel = self._unauthenticated.accept(self._listener, self._key)
        if channel is not None:
            self._selector.register(channel.socket, selectors.EVENT_READ, _Connection(channel))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel.socket)
        self._unauthenticated.trust(channel)
        channel.close()

    def _read(self, connection: _Connection) -> None:
        trouble: Exception | None = None
        try:
            chunk = connection.channel.socket.recv(65536)
            connection.channel.feed(chunk)
            for message in connection.channel.messages():
                self._unauthenticated.trust(connection.channel)
                self._on_message(connection, message)
        except (OSError, UntrustedPeer) as error:
            chunk, trouble = b"", error
        if not chunk:
            self._drop(connection.channel)
            self._on_disconnect(connection, trouble or connection.channel.trouble)

    def _on_message(self, connection: _Connection, message: Message) -> None:
        if message["type"] == "hello":
            self._register(connection, RankInfo(**message["rank_info"]))
        elif message["type"] == "expired":
            assert connection.rank is not None
            self._on_expired(self._ranks[connection.rank], message["timeout_s"])
        elif message["type"] == "failed":
            self._on_failure(message["record"])
        elif message["type"] == "request":
            self._begin_round(message)
        elif message["type"] == "next_point":
            assert connection.rank is not None
            self._rounds[message["subject"]].report(connection.rank, message["point"])
            self._decide(message["subject"])
        elif message["type"] == "goodbye":
            assert connection.rank is not None
            self._left.add(connection.rank)
            for subject in SUBJECTS:
                self._rounds[subject].waiting.discard(connection.rank)
                self._decide(subject)
            if len(self._left) == self._world_size:
                for channel in self._channels.values():
                    channel.try_send({"type": "farewell"})
                self.all_left.set()
        elif message["type"] == "status":
            assert connection.rank is not None
            self._hang_watch.observe(connection.rank, message)
        elif message["type"] == "overdue":
            self._hang_watch.ask_remaining(message["limit_s"], message["why"])
        elif message["type"] == "ping":
            connection.channel.send({"type": "ack"})

    def _check_for_hang(self) -> None:
        count = self._world_size - len(self._left)
        if not self._is_complete or self._echo is not None or not count:
            return
        record = self._hang_watch.check(self._present, count, self._world_size)
        if record is not None:
            self._broadcast_abort(self._name_early_leavers(record))

    def _name_early_leavers(self, record: FailureRecord) -> FailureRecord:
        """Adds the ranks whose script has ended to a hang that no other rank explains: the rest may wait for those."""
        if record["suspects"] or not self._left:
            return record
        early = f"{format_ranks(sorted(self._left))} ended early (it returned, or called sys.exit)"
        return record | {"error": f"{record['error']}; {early}"}

    def _present(self) -> list[RankInfo]:
        return [info for rank, info in sorted(self._ranks.items()) if rank not in self._left]

    def _request_status(self, stacks: bool) -> None:
        for rank, channel in self._channels.items():
            if rank not in self._left:
                channel.try_send({"type": "status_request", "stacks": stacks})

    def _begin_round(self, request: Message) -> None:
        """Asks all ranks how far they are, unless this subject is being decided, or was before the request arrived."""
        round = self._rounds[request["subject"]]
        if request["round"] == round.number and round.why is None:
            round.why, round.point = request["why"], 0
            round.waiting = set(self._channels) - self._left
            for channel in self._channels.values():
                channel.try_send({"type": "next_point", "subject": request["subject"]})

    def _decide(self, subject: str) -> None:
        """Picks the latest of the reported points as the one to act at, once all ranks have reported."""
        round = self._rounds[subject]
        if round.why is None or round.waiting:
            return
        decision = {"type": "decision", "subject": subject, "point": round.point, "why": round.why}
        round.why, round.number = None, round.number + 1
        for channel in self._channels.values():
            channel.try_send(decision)

    def _register(self, connection: _Connection, info: RankInfo) -> None:
        earlier = self._ranks.get(info.rank)
        if earlier is not None:
            both = f"{earlier.host} pid {earlier.pid} and {info.host} pid {info.pid}"
            why = f"two processes claim to be rank {info.rank}: {both}"
            connection.channel.send({"type": "refused", "why": why})
            return
        connection.channel.send({"type": "ack"})  # a rank that is gone by now has not joined
        connection.rank = info.rank
        self._channels[info.rank] = connection.channel
        self._ranks[info.rank] = info
        if self._is_complete:
            self._welcome_all()

    def _welcome_all(self) -> None:
        """Closes the port, since all ranks have joined, and sends each its placement."""
        self._selector.unregister(self._listener)
        self._listener.close()
        root = asdict(self._ranks[0])
        everyone = [self._ranks[rank] for rank in range(self._world_size)]
        for rank, placement in enumerate(place_ranks(everyone)):
            welcome = {"type": "welcome", "placement": asdict(placement), "root": root, **self._welcome}
            self._channels[rank].try_send(welcome)

    def _on_disconnect(self, connection: _Connection, trouble: Exception | None) -> None:
        if connection.rank is None or connection.rank in self._left:
            return
        self._channels.pop(connection.rank, None)
        for round in self._rounds.values():
            round.waiting.discard(connection.rank)
        self._on_failure(lost_rank_record(self._ranks[connection.rank], trouble))

    def _on_expired(self, info: RankInfo, timeout_s: float) -> None:
        """Names the ranks for which another one has waited in vain; that one leaves, and is not the cause."""
        if absent := self.missing():
            sentence = (
                f"{len(absent)} of {self._world_size} ranks did not join within {timeout_s:.0f} s: "
                f"{shorten_list(absent)}; look at the start of their output, or raise setup_timeout"
            )
            record = lost_rank_record(info)
            # of the kind vanished: if a node is lost meanwhile, the job is worth another start
            record |= {"error": sentence, "sentence": sentence, "hint": None}
            self._on_failure(record)

    def _on_failure(self, record: FailureRecord) -> None:
        if not record["echo"]:
            self._broadcast_abort(record)
        elif self._echo is None:
            self._echo = record
            self._echo_deadline = time.monotonic() + _ECHO_GRACE_S

    def _attribute_to_early_leaver(self, record: FailureRecord) -> FailureRecord:
        """Explains a connection that was lost without a failure: a script ended while another rank still needed it.

        The traceback belongs to the waiting rank, and shows what it needed the other for.
        """
        if not self._left:
            return record
        early = self._ranks[min(self._left)]
        waiting = f"rank {record['rank']} still needed it in {record['phase']}"
        return lost_rank_record(early) | {
            "kind": "left",
            "error": f"ended early (it returned, or called sys.exit) while {waiting}",
            "hint": None,
            "traceback": record["traceback"],
        }

    def _broadcast_abort(self, record: FailureRecord) -> None:
        """Sends the record to all ranks and exits after them, so that the cause is the last thing on the screen."""
        self._on_first_failure(record)
        others = [channel for rank, channel in self._channels.items() if rank != 0]
        # a traceback of many ranks may be too long for a message, and sending it to a stopped rank blocks this loop
        cause = record | {"traceback": None}
        for channel in others:
            channel.try_send({"type": "abort", "record": cause})
        deadline = time.monotonic() + _EXIT_GRACE_S
        for channel in others:
            _wait_for_end(channel, deadline)
        self._on_all_down(record)


@final
@dataclass
class _Round:
    """The decision on one subject: what was requested, how far the ranks are, and which have not reported."""

    number: int = 0
    why: str | None = None
    point: int = 0
    waiting: set[int] = field(default_factory=set)

    def report(self, rank: int, point: int) -> None:
        self.point = max(self.point, point)
        self.waiting.discard(rank)


@final
class _Connection:
    """A connection, and the rank at its other end once it has registered."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank: int | None = None


def lost_rank_record(info: RankInfo, trouble: Exception | None = None) -> FailureRecord:
    """Returns the record of a rank whose connection closed before it reported anything, with this error if any."""
    if isinstance(trouble, OSError) and trouble.errno in _LINK_ERRORS:
        why = os.strerror(trouble.errno or 0)
        error = (
            f"the connection from {socket.gethostname()} to {info.host} was lost ({why}), with rank {info.rank}: "
            "check the network between these nodes, and whether they are up"
        )
        return lost_rank_record(info) | {"kind": "lost", "error": error, "hint": None}
    return {
        "kind": "vanished",
        "rank": info.rank,
        "host": info.host,
        "pid": info.pid,
        "error": "exited without reporting an error",
        "hint": "killed (kill -9, out of memory), crashed in native code, or left by os._exit",
        "traceback": None,
        "exit_code": 1,
        "echo": False,
    }


def _wait_for_end(channel: Channel, deadline: float) -> None:
    try:
        while channel.receive(max(0.0, deadline - time.monotonic())) is not None:
            pass
    except (OSError, UntrustedPeer):  # time is up, or the connection is closed
        pass
