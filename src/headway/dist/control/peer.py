"""A rank's end of the connection to the hub: it joins, reports failures, and replies to the hub's requests.

The messages are listed in `hub`.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import final

from headway.dist.control.agreement import SUBJECTS, Agreement
from headway.dist.control.channel import Channel, Message, UntrustedPeer, connect
from headway.dist.control.hang_watch import check_interval_s, status_message
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.rendezvous import Rendezvous
from headway.dist.roster import RankInfo
from headway.errors import RankFailure, UsageError
from headway.system.retries import stop_requested
from headway.system.running_clock import RUNNING_CLOCK

_SILENT_FACTOR = 1.75
"""after this many times its limit, a rank reports a hub that does not reply; the agent reports after 1.5 times"""


@final
class Peer:
    """A rank's connection to the hub; `heartbeat` shows what this rank is doing when the hub asks."""

    def __init__(self, channel: Channel, heartbeat: Heartbeat) -> None:
        self._channel = channel
        self._heartbeat = heartbeat
        self.agreements = {subject: Agreement() for subject in SUBJECTS}
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._leaving = False

    def derive_key(self, purpose: str) -> bytes:
        """Returns a key that only the ranks of this launch have."""
        return self._channel.derive_key(purpose)

    def register(self, info: RankInfo, timeout: float) -> Message:
        """Registers this rank, waits until all have joined, and returns the hub's welcome."""
        self._channel.send({"type": "hello", "rank_info": asdict(info)})
        ack = self._channel.receive(timeout)
        if ack is None:
            raise UntrustedPeer("this is the hub of another launch")
        if ack["type"] == "refused":
            raise UsageError(f"{ack['why']}; start each rank once")
        try:
            answer = self._channel.receive(timeout)
        except TimeoutError:
            # the hub knows which ranks are missing; without this message it would take this rank for lost
            self._send({"type": "expired", "timeout_s": timeout})
            raise
        if answer is None:
            raise RankFailure("rank 0 exited while the ranks were joining; its own output says why")
        if answer["type"] == "abort":
            raise RankFailure(
                f"rank {answer['record']['rank']} failed while joining: {answer['record']['error']}"
            )
        return answer

    def listen(
        self,
        on_abort: Callable[[FailureRecord], None],
        on_hub_lost: Callable[[Exception | None], None],
        on_hub_silent: Callable[[], None],
    ) -> None:
        """Receives the hub's messages in the background for the rest of the run."""
        self._channel.socket.settimeout(None)
        threading.Thread(
            target=self._receive,
            args=(on_abort, on_hub_lost, on_hub_silent),
            name="headway peer",
            daemon=True,
        ).start()

    def report_failure(self, record: FailureRecord) -> None:
        """Reports that this rank failed. The hub's reply calls the `on_abort` of `listen`."""
        self._send({"type": "failed", "record": record})

    def report_overdue(self, limit_s: float, why: str) -> None:
        """Reports that others have not left within `limit_s`. The hub names them, and ends all ranks.

        `why` is for the record: that rank 0 has left, or that its script has ended.
        """
        self._send({"type": "overdue", "limit_s": limit_s, "why": why})

    def request(self, subject: str, why: str) -> None:
        """Requests that all ranks stop or save; the hub's decision goes to the agreement on that subject."""
        number = self.agreements[subject].round
        self._send({"type": "request", "subject": subject, "why": why, "round": number})

    def leave(self, timeout_s: float) -> None:
        """Announces that this rank leaves without a failure, and waits up to `timeout_s` until all ranks have done so.

        So no connection is closed while another rank still reads from it.
        """
        self._leaving = True
        self._send({"type": "goodbye"})
        self._ended.wait(timeout_s)

    def close(self) -> None:
        self._channel.close()

    def _send(self, message: Mapping[str, object]) -> None:
        with self._sending:  # both the main thread and the receiving one send
            self._channel.try_send(message)

    def _receive(
        self,
        on_abort: Callable[[FailureRecord], None],
        on_hub_lost: Callable[[Exception | None], None],
        on_hub_silent: Callable[[], None],
    ) -> None:
        trouble: Exception | None = None
        try:
            message = self._serve(on_hub_silent)
        except (OSError, UntrustedPeer, ValueError) as error:  # ValueError: closed by the main thread
            message, trouble = None, error
        self._ended.set()
        if message is not None and message["type"] == "abort":
            on_abort(message["record"])
        elif message is None and not self._leaving:
            on_hub_lost(trouble or self._channel.trouble)

    def _serve(self, on_hub_silent: Callable[[], None]) -> Message | None:
        """Replies to the hub's requests until its final message, which is returned; None when the hub is gone."""
        heartbeat, last_message = self._heartbeat, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.socket, selectors.EVENT_READ)
            while True:
                for message in self._channel.messages():
                    last_message = time.monotonic()
                    if message["type"] == "status_request":
                        self._send(status_message(heartbeat, message))
                    elif message["type"] == "next_point":
                        subject = message["subject"]
                        if subject == "stop":
                            stop_requested.set()
                        point = self.agreements[subject].propose()
                        self._send({"type": "next_point", "subject": subject, "point": point})
                    elif message["type"] == "decision":
                        self.agreements[message["subject"]].decide(message["point"], message["why"])
                    elif message["type"] != "ack":
                        return message
                if selector.select(check_interval_s(heartbeat) if heartbeat.period else None):
                    chunk = self._channel.socket.recv(65536)
                    if not chunk:
                        return None
                    self._channel.feed(chunk)
                elif (
                    heartbeat.age >= _SILENT_FACTOR * heartbeat.limit
                    and RUNNING_CLOCK.since(last_message) >= heartbeat.limit / 2
                ):
                    on_hub_silent()
                elif heartbeat.age >= heartbeat.limit:
                    self._send({"type": "ping"})  # a hub that runs acknowledges it


def connect_to_hub(
    rendezvous: Rendezvous, info: RankInfo, timeout: float, heartbeat: Heartbeat | None = None
) -> tuple[Peer, Message, str]:
    """Finds rank 0 and registers with it. Returns the connection, the welcome, and the host name that was reached.

    An address that does not respond, or has another key, may be left over from an earlier launch: try again.
    """
    deadline = time.monotonic() + timeout
    pause_s = 0.01
    trouble = "it has not published its address"
    while (left := deadline - time.monotonic()) > 0:
        try:
            address = rendezvous.find()
        except OSError as error:  # a file system that many nodes share fails now and then
            address, trouble = None, f"its address cannot be read ({error})"
        for host in address.hosts if address else ():
            assert address is not None
            try:
                channel = connect(host, address.port, address.key, timeout=min(left, 5.0))
            except (OSError, UntrustedPeer) as error:
                trouble = f"{host}:{address.port}: {error}"
                continue
            try:
                peer = Peer(channel, heartbeat or Heartbeat())
                return peer, peer.register(info, deadline - time.monotonic()), host
            except (OSError, UntrustedPeer) as error:
                why = "some ranks never joined" if isinstance(error, TimeoutError) else error
                trouble = f"{host}:{address.port} did not accept this rank ({why})"
                channel.close()
            except BaseException:
                channel.close()
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.5)
    raise RankFailure(
        f"rank {info.rank} on {info.host} waited {timeout:.0f} s for rank 0 and the others: {trouble}; "
        f"check that all ranks were started and that the hosts can reach each other"
    )
