"""Every link is tried once, and a slow or wrong one is named exactly."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest
import torch.distributed as td
import warm
from hypothesis import given, strategies as st
from torch import Tensor

from headway.dist.topology import interconnect
from headway.dist.topology.interconnect import Interconnect, Link, ProcessGroupTransport, check_interconnect
from headway.dist.topology.tournament import schedule
from headway.errors import UsageError
from headway.testing import ranks

# ---- who meets whom


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_every_two_ranks_meet_once_and_nobody_twice_in_a_round(hosts: list[str]) -> None:
    rounds = schedule(hosts)
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert met == Counter(frozenset(pair) for pair in combinations(range(len(hosts)), 2))
    for pairs in rounds:
        players = [rank for pair in pairs for rank in pair]
        assert len(players) == len(set(players)) > 0
        kinds = {hosts[a] == hosts[b] for a, b in pairs}
        assert len(kinds) == 1  # links inside and between machines are not measured together


@pytest.mark.parametrize(
    ("nodes", "each", "rounds"), [(1, 2, 1), (1, 8, 7), (2, 8, 15), (4, 2, 7), (4, 1, 3), (3, 1, 3)]
)
def test_full_machines_need_few_rounds(nodes: int, each: int, rounds: int) -> None:
    assert len(schedule([f"n{rank // each}" for rank in range(nodes * each)])) == rounds


def test_links_between_two_machines_all_work_at_once() -> None:
    between = schedule(["n1"] * 8 + ["n2"] * 8)[7:]
    assert [len(pairs) for pairs in between] == [8] * 8
    assert all(a < 8 <= b for pairs in between for a, b in pairs)  # and in the same direction


# ---- real ranks, real bytes


@dataclass
class BadWire:
    """The process group, but some directions are slow and some change bytes."""

    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    corrupt: dict[tuple[int, int], int] = field(default_factory=dict)
    wrong_sums_on: int | None = None

    def __post_init__(self) -> None:
        self.group = ProcessGroupTransport()
        self.device = self.group.device

    def send(self, tensor: Tensor, to: int) -> None:
        link = (td.get_rank(), to)
        if tensor.numel() > 1:
            time.sleep(self.slow.get(link, 0.0))
            tensor = tensor.clone()
            tensor[: self.corrupt.get(link, 0)] += 1
        self.group.send(tensor, to)

    def receive(self, tensor: Tensor, sender: int) -> None:
        self.group.receive(tensor, sender)

    def all_reduce(self, tensor: Tensor) -> None:
        self.group.all_reduce(tensor)
        if td.get_rank() == self.wrong_sums_on and tensor.numel() > 1:
            tensor[-3:] += 1


def everybodys(value: object) -> list[object]:
    values: list[object] = [None] * td.get_world_size()
    td.all_gather_object(values, value)
    return values


@ranks(3)
def test_a_good_interconnect_is_measured_in_every_direction_and_all_ranks_hear_the_same() -> None:
    result = check_interconnect(megabytes=1)
    assert {(link.sender, link.receiver) for link in result.links} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert all(
        link.wrong == 0 and link.gigabytes_per_second > 0 and link.microseconds > 0 for link in result.links
    )
    assert result.all_reduce > 0
    assert list(result.all_reduce_wrong) == [0, 0, 0]
    assert result.device == "cpu"
    assert result.verdict != "wrong"  # on a busy machine a link may well be slow
    facts = json.dumps(result.to_dict())
    assert everybodys(facts) == [facts] * 3


@ranks(4)
def test_a_slow_direction_is_named() -> None:
    result = check_interconnect(megabytes=1, transport=BadWire(slow={(1, 3): 0.5}))
    assert result.verdict == "slow"
    assert [
        (link.sender, link.receiver) for link in result.slow_links() if link.gigabytes_per_second < 0.0025
    ] == [(1, 3)]
    [problem] = [
        text for text in result.problems() if text.startswith("rank 1 (host ") and " -> rank 3 (host " in text
    ]
    assert "0.00 GB/s, where " in problem


@ranks(4)
def test_changed_bytes_are_counted_and_their_direction_is_named() -> None:
    result = check_interconnect(megabytes=1, transport=BadWire(corrupt={(1, 3): 4096}))
    assert result.verdict == "wrong"
    assert {(link.sender, link.receiver): link.wrong for link in result.links if link.wrong} == {(1, 3): 4096}
    host = result.hosts[0]
    assert (
        result.problems()[0] == f"rank 1 (host {host}) -> rank 3 (host {host}): 4096 of 1048576 bytes wrong"
    )


@ranks(2)
def test_wrong_sums_are_counted_and_their_rank_is_named() -> None:
    result = check_interconnect(megabytes=1, transport=BadWire(wrong_sums_on=1))
    assert result.verdict == "wrong"
    assert (
        result.problems()[0] == f"all-reduce: rank 1 (host {result.hosts[1]}) got 3 of 262144 numbers wrong"
    )


class Swapped(BadWire):
    """Delivers the right bytes in the wrong place."""

    def send(self, tensor: Tensor, to: int) -> None:
        self.group.send(tensor.roll(8) if tensor.numel() > 1 else tensor, to)


@ranks(2)
def test_bytes_in_the_wrong_place_are_wrong() -> None:
    result = check_interconnect(megabytes=1, transport=Swapped())
    assert all(link.wrong > 0.9 * link.bytes for link in result.links)


SILENT = """
import sys, time, datetime
import torch.distributed as td
from headway.dist.topology.interconnect import check_interconnect, ProcessGroupTransport
from headway.errors import RankFailure

class Silent:
    def __init__(self):
        self.device, self.all_reduce = ProcessGroupTransport().device, ProcessGroupTransport().all_reduce
    def send(self, tensor, to):
        time.sleep(600)
    receive = send

rank, store = int(sys.argv[1]), td.FileStore(sys.argv[2], 3)
store.add("here", 1)
while store.add("here", 0) < 3:  # on a busy machine one may come later than the timeout below
    time.sleep(0.05)
td.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=5))
try:
    check_interconnect(megabytes=1, transport=Silent() if rank == 2 else None)
except RankFailure as error:
    print(error)
"""


def test_a_silent_rank_ends_the_check_at_the_groups_timeout(tmp_path: Path) -> None:
    """Rank 2 is alive and says nothing after the canary: the others must not wait for ever."""
    command = [sys.executable, "-c", SILENT]
    started = [
        warm.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        told = [process.communicate(timeout=180)[0] for process in started[:2]]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for rank, text in enumerate(told):
        assert text.startswith("the interconnect check stopped in round")
        assert f"where rank {rank} (host {socket.gethostname()})" in text


def test_alone_there_is_nothing_to_check() -> None:
    result = check_interconnect()
    assert result.verdict == "ok"
    assert result.table() == "interconnect of 1 ranks on cpu: ok"


@pytest.mark.parametrize("megabytes", [0, -1])
def test_too_few_bytes_are_refused(megabytes: int) -> None:
    with pytest.raises(UsageError, match=f"megabytes={megabytes}"):
        check_interconnect(megabytes=megabytes)


# ---- the verdict, from numbers


def result_of(hosts: Sequence[str], speed: dict[tuple[int, int], float]) -> Interconnect:
    pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b]
    links = [
        Link(sender=a, receiver=b, gigabytes_per_second=speed[a, b], microseconds=5.0, bytes=2**24, wrong=0)
        for a, b in pairs
    ]
    return Interconnect(
        hosts=hosts,
        device="cuda",
        bytes=2**24,
        all_reduce=100.0,
        all_reduce_wrong=[0] * len(hosts),
        links=links,
    )


def two_machines() -> tuple[list[str], dict[tuple[int, int], float]]:
    hosts = ["n1", "n1", "n2", "n2"]
    return hosts, {
        (a, b): 300.0 if hosts[a] == hosts[b] else 40.0 for a in range(4) for b in range(4) if a != b
    }


def test_links_are_compared_with_their_own_kind() -> None:
    hosts, speed = two_machines()
    assert result_of(hosts, speed).verdict == "ok"
    speed[2, 3] = 50.0  # fast between machines, slow inside one
    assert result_of(hosts, speed).problems() == [
        "rank 2 (host n2) -> rank 3 (host n2): 50.00 GB/s, where 300.00 is usual inside a machine"
    ]


def test_just_above_half_of_the_usual_is_not_slow() -> None:
    hosts, speed = two_machines()
    speed[0, 2], speed[3, 1] = 20.1, 19.9
    assert [(link.sender, link.receiver) for link in result_of(hosts, speed).slow_links()] == [(3, 1)]


def test_a_rank_that_is_slow_towards_everybody_is_named_once() -> None:
    hosts = [f"n{rank}" for rank in range(6)]
    speed = {(a, b): 2.0 if 4 in (a, b) else 40.0 for a in range(6) for b in range(6) if a != b}
    assert result_of(hosts, speed).problems() == ["rank 4 (host n4): slow to and from every other rank"]


def test_the_table_shows_the_matrix_and_marks_what_is_bad() -> None:
    hosts, speed = two_machines()
    speed[0, 3] = 4.0
    assert result_of(hosts, speed).table().splitlines() == [
        "interconnect of 4 ranks on cuda: slow",
        "all-reduce of 16 MiB: 100.00 GB/s bus bandwidth",
        "inside a machine: 4 links, median 300.00 GB/s, slowest 300.00 GB/s, latency 5 us",
        "between machines: 8 links, median 40.00 GB/s, slowest 4.00 GB/s, latency 5 us",
        "GB/s          0        1        2        3   (! slow, X wrong)",
        "    0        -   300.00    40.00     4.00!  n1",
        "    1   300.00        -    40.00    40.00   n1",
        "    2    40.00    40.00        -   300.00   n2",
        "    3    40.00    40.00   300.00        -   n2",
        "rank 0 (host n1) -> rank 3 (host n2): 4.00 GB/s, where 40.00 is usual between machines",
    ]


def test_a_large_table_leaves_the_matrix_out() -> None:
    hosts = [f"n{rank}" for rank in range(17)]
    speed = {(a, b): 40.0 for a in range(17) for b in range(17) if a != b}
    assert len(result_of(hosts, speed).table().splitlines()) == 3


def test_patterns_of_links_differ_and_do_not_repeat() -> None:
    patterns = {bytes(interconnect._pattern(a, b, 4096).tolist()) for a in range(3) for b in range(3)}
    assert len(patterns) == 9
    pattern = interconnect._pattern(0, 1, 4096)
    assert all(
        (pattern == pattern.roll(shift)).float().mean() < 0.05 for shift in (1, 2, 4, 8, 16, 256, 1024)
    )
