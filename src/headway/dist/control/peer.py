"""A rank's end of the wire: it joins, reports, answers, and learns at once that another rank is in trouble.

The hub in rank 0's process is at the other end; see `control` for what is said.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import final

from headway.dist.control.agreement import Agreement
from headway.dist.control.channel import Channel, UntrustedPeer, Message, call
from headway.dist.control.hang_watch import answer, pause
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.rendezvous import Rendezvous
from headway.dist.roster import RankInfo
from headway.errors import RankFailure, UsageError


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

    def enter(self, member: RankInfo, timeout: float) -> Message:
        """Introduces this rank and waits until all are here. Returns the hub's welcome."""
        self._channel.send({"type": "hello", "member": asdict(member)})
        noted = self._channel.receive(timeout)
        if noted is None:
            raise UntrustedPeer("this is the hub of another launch")
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
        on_abort: Callable[[FailureRecord], None],
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

    def report(self, record: FailureRecord) -> None:
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
            self._channel.offer(message)

    def _listen(
        self,
        on_abort: Callable[[FailureRecord], None],
        on_hub_lost: Callable[[], None],
        on_hub_silent: Callable[[], None],
    ) -> None:
        try:
            message = self._last_word(on_hub_silent)
        except (OSError, UntrustedPeer, ValueError):  # ValueError: closed by the main thread
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


def connect_to_hub(
    meeting: Rendezvous, member: RankInfo, timeout: float, heart: Heartbeat | None = None
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
            except (OSError, UntrustedPeer) as error:
                trouble = f"{host}:{address.port}: {error}"
                continue
            try:
                peer = Peer(channel, heart or Heartbeat())
                return peer, peer.enter(member, deadline - time.monotonic()), host
            except (OSError, UntrustedPeer) as error:
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
