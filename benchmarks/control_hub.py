"""How long the hub takes with thousands of ranks: to join, to agree on where to stop, and to end after a failure.

    python benchmarks/control_hub.py [--ranks 4096] [--ranks-per-node 8]

All ranks are sockets of this process, which share one interpreter with the hub, so a cluster is faster. Prints seconds
and the memory of hub and ranks for a quarter of the ranks and for all of them: four times as many ranks take four times
as long, and not sixteen times.
"""

from __future__ import annotations

import argparse
import resource
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import psutil

from headway.dist.control.channel import Channel, connect
from headway.dist.control.hub import Hub
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure.record import FailureRecord
from headway.dist.rendezvous import listen
from headway.dist.roster import RankInfo

KEY = b"k" * 32
TIMEOUT_S = 120.0


class SimulatedRanks:
    """A hub, and the connections of all its ranks, which are driven by one loop."""

    def __init__(
        self, ranks: int, ranks_per_node: int, prepare: Callable[[Hub], object] = lambda _: None
    ) -> None:
        here = LaunchEnvironment(launcher="mpi", rank=0, world_size=2, local_world_size=2, node="here")
        listener, (host, *_) = listen(here)
        self._address = (host, listener.getsockname()[1])
        self._ranks, self._ranks_per_node = ranks, ranks_per_node
        self.ended = threading.Event()
        self.hub = Hub(
            listener,
            KEY,
            ranks,
            welcome={},
            on_first_failure=lambda _: None,
            on_all_down=self._on_all_down,
        )
        prepare(self.hub)
        self.hub.start()
        self.channels: list[Channel] = []
        self._selector = selectors.DefaultSelector()

    def _on_all_down(self, _: FailureRecord) -> None:
        self.ended.set()
        self.hub.all_left.set()  # where a rank 0 would exit

    def join(self) -> None:
        """Connects all ranks, and waits until each knows its place."""
        for rank in range(self._ranks):
            channel = connect(*self._address, KEY, TIMEOUT_S)
            node = f"n{rank // self._ranks_per_node}"
            info = RankInfo(rank=rank, host=node, node=node, pid=rank, local_rank=None, visible_gpus=None)
            channel.send({"type": "hello", "rank_info": asdict(info)})
            self.channels.append(channel)
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        self._wait_for_all("welcome")

    def stop(self) -> None:
        """One rank asks to stop; all report how far they are, and learn where to stop."""
        self.channels[-1].send({"type": "request", "subject": "stop", "round": 0, "why": "SIGTERM"})
        points = iter(range(self._ranks))

        def report(channel: Channel) -> None:
            channel.send({"type": "next_point", "subject": "stop", "point": next(points)})

        decision = self._wait_for_all("decision", on_other=report)
        assert decision["point"] == self._ranks - 1, decision

    def fail(self) -> None:
        """One rank fails; all others learn of it and exit, and the hub sees that."""
        record = {"rank": 1, "echo": False, "error": "ValueError", "traceback": "x" * 5000}
        self.channels[1].send({"type": "failed", "record": record})
        self._wait_for_all("abort", ranks=range(1, self._ranks), close=True)
        assert self.ended.wait(TIMEOUT_S)

    def close(self) -> None:
        self._selector.close()
        for channel in self.channels:
            channel.close()
        self.hub.join(TIMEOUT_S)

    def _wait_for_all(
        self,
        wanted: str,
        *,
        ranks: range | None = None,
        close: bool = False,
        on_other: Callable[[Channel], object] = lambda _: None,
    ) -> dict[str, Any]:
        waiting = {id(self.channels[rank]) for rank in ranks or range(self._ranks)}
        message: dict[str, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} ranks wait for {wanted}"
            for key, _ in self._selector.select(1.0):
                channel: Channel = key.data
                channel.feed(channel.socket.recv(65536))
                for message in channel.messages():
                    if message["type"] != wanted:
                        on_other(channel)
                        continue
                    waiting.discard(id(channel))
                    if close:
                        self._selector.unregister(channel.socket)
                        channel.close()
        return message


def measure(ranks: int, ranks_per_node: int) -> dict[str, float]:
    """Returns seconds for each thing that the hub does, and the memory that it and the ranks take."""
    before = psutil.Process().memory_info().rss
    simulated = SimulatedRanks(ranks, ranks_per_node)
    found = {}
    for name, work in {"join": simulated.join, "stop": simulated.stop, "abort": simulated.fail}.items():
        begin = time.perf_counter()
        work()
        found[f"{name}, s"] = time.perf_counter() - begin
        if name == "stop":
            found["memory, MB"] = (psutil.Process().memory_info().rss - before) / 1e6
    simulated.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measure(64, 8)  # imports and first allocations are not counted
    counts = (options.ranks // 4, options.ranks)
    results = [measure(count, options.ranks_per_node) for count in counts]
    print(f"load average {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} CPUs")
    print(f"{'':12}{counts[0]:>12,}{counts[1]:>12,}{'ratio':>9}")
    for name in results[0]:
        few, many = results[0][name], results[1][name]
        print(f"{name:12}{few:12.3f}{many:12.3f}{many / few:9.1f}")


if __name__ == "__main__":
    main()
