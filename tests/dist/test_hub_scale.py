"""What the hub does for a message does not depend on how many ranks there are. Counts, not seconds."""

from __future__ import annotations

import errno
import importlib.util
import resource
import selectors
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from headway.dist import join as join_module
from headway.dist.control import hang_watch
from headway.dist.control.hub import Hub
from headway.dist.control.unauthenticated import UnauthenticatedConnections
from headway.dist.group import RankGroup
from headway.dist.roster import RankInfo
from headway.errors import UsageError
from headway.system import running_clock


class Counted(dict[int, Any]):
    """A mapping that counts how many of its entries were looked at."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[int]:
        self.looks += len(self)
        return super().__iter__()

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "control_hub.py"
    spec = importlib.util.spec_from_file_location("control_hub", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["control_hub"] = module
    spec.loader.exec_module(module)
    return module


def test_nothing_is_quadratic(benchmark: ModuleType) -> None:
    def count(hub: Hub) -> None:
        hub._ranks, hub._channels = Counted(), Counted()

    ranks = 64
    simulated = benchmark.SimulatedRanks(ranks, 8, prepare=count)
    try:
        looks = {}
        for name in ("join", "stop", "fail"):
            before = simulated.hub._ranks.looks + simulated.hub._channels.looks
            getattr(simulated, name)()
            looks[name] = simulated.hub._ranks.looks + simulated.hub._channels.looks - before
    finally:
        simulated.close()
    assert all(count <= 8 * ranks for count in looks.values()), looks


def test_a_connection_that_is_gone_before_it_is_accepted_does_not_end_the_hub(benchmark: ModuleType) -> None:
    class Flaky(socket.socket):
        failures = 3

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise ConnectionAbortedError
            return super().accept()

    def replace_listener(hub: Hub) -> None:
        hub._selector.unregister(hub._listener)
        hub._listener = Flaky(fileno=hub._listener.detach())
        hub._selector.register(hub._listener, selectors.EVENT_READ)

    simulated = benchmark.SimulatedRanks(2, 2, prepare=replace_listener)
    try:
        simulated.join()
        simulated.fail()
    finally:
        simulated.close()


def test_each_rank_may_open_a_file_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(rank: int, world_size: int) -> None:
        """Joins the others as far as to the first thing that needs files."""
        launch: Any = SimpleNamespace(
            rank=rank,
            world_size=world_size,
            local_world_size=1,
            node="n",
            local_rank=None,
            store_address=None,
        )
        with pytest.raises(ConnectionAbortedError):
            join_module._rendezvous(RankGroup(launch=launch), 1.0)

    def abort(_: object) -> None:
        raise ConnectionAbortedError

    monkeypatch.setattr(join_module, "file_rendezvous", abort)
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    for soft, hard in ((1024, 4096), (4096, 4096), (1024, resource.RLIM_INFINITY)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        join(0, 1000)
        join(7, 1000)
    unlimited = resource.RLIM_INFINITY
    assert made == [(4096, 4096), (4096, 4096), (65536, unlimited), (65536, unlimited)]
    made.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, unlimited))
    join(0, 30_000)
    assert made == [(90_128, unlimited)]
    made.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(
        UsageError, match=r"rank 0 needs 12,416 open files for 4,096 ranks, and the limit is 4,096"
    ):
        join(0, 4096)
    join(7, 4096)
    assert made == [(4096, 4096)]


def test_ranks_get_the_cause_without_its_traceback(benchmark: ModuleType) -> None:
    """The report of a hang of a thousand ranks is longer than any message that a rank reads."""
    simulated = benchmark.SimulatedRanks(2, 2)
    try:
        simulated.join()
        record = {"rank": 1, "echo": False, "error": "ValueError", "traceback": "x" * 5000}
        simulated.channels[1].send({"type": "failed", "record": record})
        message = simulated._wait_for_all("abort", ranks=range(1, 2), close=True)
        assert simulated.ended.wait(20)
    finally:
        simulated.close()
    assert message["record"] == record | {"traceback": None}


def test_idle_connections_of_others_are_few_and_ranks_join_beside_them(benchmark: ModuleType) -> None:
    """Everybody can connect to the port. Seen red with 300 files held for as many strangers."""
    idle: list[socket.socket] = []

    def connect_idle(hub: Hub) -> None:
        address = hub._listener.getsockname()
        idle.extend(socket.create_connection(address, timeout=20) for _ in range(300))

    simulated = benchmark.SimulatedRanks(4, 2, prepare=connect_idle)
    try:
        simulated.join()
        wait_until(lambda: len(simulated.hub._selector.get_map() or ()) <= 128 + 4, "the oldest are closed")
        assert sum(map(is_closed, idle)) >= 300 - 128
        simulated.fail()
    finally:
        simulated.close()
        for each in idle:
            each.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection, on which it had sent its random number."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_strangers_that_are_silent_or_take_the_last_file_are_let_go() -> None:
    class Full:
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    full: Any = Full()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        patient, hasty = (
            UnauthenticatedConnections(expected=2),
            UnauthenticatedConnections(expected=2, proof_s=0.0),
        )
        for strangers in (patient, hasty):
            for _ in range(4):
                stack.enter_context(socket.create_connection(listener.getsockname()))
                channel = strangers.accept(listener, b"k" * 32)
                assert channel is not None
                stack.callback(channel.close)
        strangers.trust(channel)
        assert len(hasty.overdue()) == 3, "one has shown that it knows the key"
        assert patient.overdue() == hasty.overdue() == []
        assert patient.accept(full, b"k" * 32) is None
        assert len(patient.overdue()) == 3, "half of them, and one"
        assert patient.overdue() == []


def test_a_hang_goes_through_the_ranks_once_all_have_replied(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, walks, now = 64, [], [1000.0]
    heartbeat: Any = SimpleNamespace(period=10.0, age=11.0, limit=10.0)
    watch = hang_watch.HangWatch(heartbeat=heartbeat, request_status=lambda _: None)
    for module in (hang_watch, running_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def present() -> list[RankInfo]:
        walks.append(now[0])
        return [
            RankInfo(rank=rank, host="h", node="h", pid=rank, local_rank=None, visible_gpus=None)
            for rank in range(ranks)
        ]

    assert watch.check(present, ranks, ranks) is None  # asks for stacks
    now[0] += 0.1
    for rank in range(ranks):
        age, limit = (0.0, 10.0) if rank == 5 else (11.0, 10.0)
        watch.observe(rank, {"age": age, "limit": limit})
        assert watch.check(present, ranks, ranks) is None  # rank 5 makes progress
    assert len(walks) == 1
