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

from headway.dist.agreement import Agreement
from headway.dist.channel import Channel, Forged, Message, call
from headway.dist.meeting import Meeting
from headway.dist.roster import Member, seats
from headway.dist.watching import Watch, answer, pause
from headway.errors import RankFailure, UsageError
from headway.failure import Record
from headway.heartbeat import Heartbeat

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
        on_verdict: Callable[[Record], object],
        on_end: Callable[[Record], None],
        heart: Heartbeat | None = None,
    ) -> None:
        super().__init__(name="headway hub", daemon=True)
        self._listener = listener
        self._key = key
        self._world_size = world_size
        self._welcome = welcome
        self._on_verdict = on_verdict
        self._on_end = on_end
        self._members: dict[int, Member] = {}
        self._channels: dict[int, Channel] = {}
        self._left: set[int] = set()
        self._stop_round = 0
        self._stop_why: str | None = None  # somebody asked for a stop, and the ranks say how far they are
        self._next_points: dict[int, int] = {}
        self._echo: Record | None = None
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
                self._pronounce(self._blame_those_who_left(self._echo))
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
        self._selector.register(sock, selectors.EVENT_READ, _Caller(channel))

    def _read(self, caller: _Caller) -> None:
        try:
            chunk = caller.channel.socket.recv(65536)
            caller.channel.feed(chunk)
            for message in caller.channel.take():
                self._hear(caller, message)
        except (OSError, Forged):
            chunk = b""
        if not chunk:
            self._selector.unregister(caller.channel.socket)
            caller.channel.close()
            self._hung_up(caller)

    def _hear(self, caller: _Caller, message: Message) -> None:
        if message["type"] == "hello":
            self._enter(caller, Member(**message["member"]))
        elif message["type"] == "failed":
            self._judge(message["record"])
        elif message["type"] == "stop" and message["round"] == self._stop_round and self._stop_why is None:
            self._stop_why, self._next_points = message["why"], {}
            for channel in self._channels.values():
                _send_if_there(channel, {"type": "next"})
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
                    _send_if_there(channel, {"type": "farewell"})
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
            self._pronounce(record)

    def _ask(self, stacks: bool) -> None:
        for rank, channel in self._channels.items():
            if rank not in self._left:
                _send_if_there(channel, {"type": "ask", "stacks": stacks})

    def _decide_stop(self) -> None:
        """Once all have said which point comes next for them, the latest is it."""
        if self._stop_why is None or not self._left.union(self._next_points).issuperset(self._channels):
            return
        word = {"type": "stop", "point": max(self._next_points.values(), default=0), "why": self._stop_why}
        self._stop_why, self._stop_round = None, self._stop_round + 1
        for channel in self._channels.values():
            _send_if_there(channel, word)

    def _enter(self, caller: _Caller, member: Member) -> None:
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
            self._open_the_doors()

    def _open_the_doors(self) -> None:
        """All are here: nobody else is expected, so the port closes, and everybody hears where it sits."""
        self._selector.unregister(self._listener)
        self._listener.close()
        root = asdict(self._members[0])
        for rank, seat in enumerate(seats([self._members[rank] for rank in range(self._world_size)])):
            welcome = {"type": "welcome", "seat": asdict(seat), "root": root, **self._welcome}
            _send_if_there(self._channels[rank], welcome)

    def _hung_up(self, caller: _Caller) -> None:
        if caller.rank is None or caller.rank in self._left:
            return
        self._channels.pop(caller.rank, None)
        self._judge(vanished(self._members[caller.rank]))

    def _judge(self, record: Record) -> None:
        if not record["echo"]:
            self._pronounce(record)
        elif self._echo is None:
            self._echo = record
            self._echo_deadline = time.monotonic() + _ECHO_GRACE

    def _blame_those_who_left(self, record: Record) -> Record:
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

    def _pronounce(self, record: Record) -> None:
        """Tells everybody, lets them go first, and goes last: so the cause is the last thing on the screen."""
        self._on_verdict(record)
        others = [channel for rank, channel in self._channels.items() if rank != 0]
        for channel in others:
            _send_if_there(channel, {"type": "abort", "record": record})
        deadline = time.monotonic() + _EXIT_GRACE
        for channel in others:
            _wait_for_end(channel, deadline)
        self._on_end(record)


@final
class _Caller:
    """A connection, and the rank at its other end once it has said so."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank: int | None = None


@final
class Peer:
    """A rank's line to the hub. `heart` says what this rank is doing, when the hub asks."""

    def __init__(self, channel: Channel, heart: Heartbeat) -> None:
        self._channel = channel
        self._heart = heart
        self.agreement = Agreement()
        self._sending = threading.Lock()
        self._heard = threading.Event()
        self._leaving = False

    def enter(self, member: Member, timeout: float) -> Message:
        """Introduces this rank and waits until all are here. Returns the hub's welcome."""
        self._channel.send({"type": "hello", "member": asdict(member)})
        noted = self._channel.receive(timeout)
        if noted is None:
            raise Forged("this is the hub of another launch")
        if noted["type"] == "refused":
            raise UsageError(f"{noted['why']}; start each rank once")
        answer = self._channel.receive(timeout)
        if answer is None:
            raise RankFailure("rank 0 died while the ranks were joining; its own output says why")
        if answer["type"] == "abort":
            raise RankFailure(
                f"rank {answer['record']['rank']} failed while joining: {answer['record']['error']}"
            )
        return answer

    def watch(
        self,
        on_abort: Callable[[Record], None],
        on_hub_lost: Callable[[], None],
        on_hub_silent: Callable[[], None],
    ) -> None:
        """Listens in the background for the rest of the run."""
        self._channel.socket.settimeout(None)
        threading.Thread(
            target=self._listen,
            args=(on_abort, on_hub_lost, on_hub_silent),
            name="headway peer",
            daemon=True,
        ).start()

    def report(self, record: Record) -> None:
        """Tells the hub that this rank failed. The answer, or the hub's end, comes to those whom `watch` was given."""
        self._say({"type": "failed", "record": record})

    def ask_to_stop(self, why: str) -> None:
        """Asks for a stop of all ranks; where it will be comes to `agreement`."""
        self._say({"type": "stop", "why": why, "round": self.agreement.round})

    def leave(self, patience: float) -> None:
        """Says goodbye, so that the end of this connection is no failure, and waits a moment for the others to say so.

        When all have, nobody's connections are torn while somebody still reads from them.
        """
        self._leaving = True
        self._say({"type": "goodbye"})
        self._heard.wait(patience)

    def close(self) -> None:
        self._channel.close()

    def _say(self, message: Mapping[str, object]) -> None:
        with self._sending:  # the main thread and the listening one
            _send_if_there(self._channel, message)

    def _listen(
        self,
        on_abort: Callable[[Record], None],
        on_hub_lost: Callable[[], None],
        on_hub_silent: Callable[[], None],
    ) -> None:
        try:
            message = self._last_word(on_hub_silent)
        except (OSError, Forged, ValueError):  # ValueError: closed by the main thread
            message = None
        self._heard.set()
        if message is not None and message["type"] == "abort":
            on_abort(message["record"])
        elif message is None and not self._leaving:
            on_hub_lost()

    def _last_word(self, on_hub_silent: Callable[[], None]) -> Message | None:
        """Answers the hub's questions until it says its last word; None when it is gone."""
        heart, heard = self._heart, time.monotonic()
        with selectors.DefaultSelector() as line:
            line.register(self._channel.socket, selectors.EVENT_READ)
            while True:
                for message in self._channel.take():
                    heard = time.monotonic()
                    if message["type"] == "ask":
                        self._say(answer(heart, message))
                    elif message["type"] == "next":
                        self._say({"type": "next", "point": self.agreement.promise()})
                    elif message["type"] == "stop":
                        self.agreement.decide(message["point"], message["why"])
                    elif message["type"] != "noted":
                        return message
                if line.select(pause(heart) if heart.period else None):
                    chunk = self._channel.socket.recv(65536)
                    if not chunk:
                        return None
                    self._channel.feed(chunk)
                elif heart.age >= 1.75 * heart.limit and time.monotonic() - heard >= heart.limit / 2:
                    on_hub_silent()
                elif heart.age >= heart.limit:
                    self._say({"type": "still"})  # a hub that lives takes note


def vanished(member: Member) -> Record:
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


def join(
    meeting: Meeting, member: Member, timeout: float, heart: Heartbeat | None = None
) -> tuple[Peer, Message, str]:
    """Finds rank 0 and enters. Returns the line to it, its welcome, and the name under which it was reached.

    An address that does not answer, or answers with another key, may be left over from a launch that died: look again.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    trouble = "it has not published its address"
    while (left := deadline - time.monotonic()) > 0:
        address = meeting.look()
        for host in address.hosts if address else ():
            assert address is not None
            try:
                channel = call(host, address.port, address.key, timeout=min(left, 5.0))
            except (OSError, Forged) as error:
                trouble = f"{host}:{address.port}: {error}"
                continue
            try:
                peer = Peer(channel, heart or Heartbeat())
                return peer, peer.enter(member, deadline - time.monotonic()), host
            except (OSError, Forged) as error:
                trouble = f"{host}:{address.port} did not let us in ({error or 'some ranks never came'})"
                channel.close()
            except BaseException:
                channel.close()
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    raise RankFailure(
        f"rank {member.rank} on {member.host} waited {timeout:.0f} s for rank 0 and the others: {trouble}; "
        f"check that all ranks were started and that the hosts can reach each other"
    )


def _send_if_there(channel: Channel, message: Mapping[str, object]) -> bool:
    try:
        channel.send(message)
    except OSError:
        return False
    return True


def _wait_for_end(channel: Channel, deadline: float) -> None:
    try:
        while channel.receive(max(0.0, deadline - time.monotonic())) is not None:
            pass
    except (OSError, Forged):  # time is up, or it is gone: either way there is nothing to wait for
        pass
