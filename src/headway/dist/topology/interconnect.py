"""The check of every link between ranks: one all-reduce as a canary, then each pair of ranks by itself.

Pairs are measured in the rounds of `headway.dist.topology.tournament`: n ranks need about n - 1 rounds. A rank whose
peer has exited waits no longer than the process group's timeout.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal, Protocol, final

import torch
import torch.distributed as td
from torch import Tensor

from headway.dist.collective.exchange import RankExchange, rank_and_size
from headway.dist.group import is_initialized
from headway.dist.seeding import derive_seed
from headway.dist.topology.tournament import Pair, schedule
from headway.errors import RankFailure, UsageError
from headway.system.failpoints import failpoint

_REPEATS: Final = 3
"""the best one counts: a busy machine makes a link look slow, and nothing makes it look fast"""
_PINGS: Final = 8
_SLOW_FRACTION: Final = 0.5  # of the median of the links of the same kind
_MAX_TABLE_RANKS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two ranks, as measured: `wrong` of `bytes` bytes arrived changed."""

    sender: int
    receiver: int
    gigabytes_per_second: float
    microseconds: float
    bytes: int
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """The result of `check_interconnect`, equal on every rank; `all_reduce` is the bus bandwidth in GB/s."""

    hosts: Sequence[str]
    device: str
    bytes: int
    all_reduce: float
    all_reduce_wrong: Sequence[int]
    links: Sequence[Link]

    @property
    def verdict(self) -> Literal["ok", "slow", "wrong"]:
        """The worst finding."""
        if any(self.all_reduce_wrong) or any(link.wrong for link in self.links):
            return "wrong"
        return "slow" if self.slow_links() else "ok"

    def slow_links(self) -> list[Link]:
        """Returns the links below half of the median of their kind (inside a machine, between machines)."""
        usual = self._usual()
        return [
            link
            for link in self.links
            if link.gigabytes_per_second < _SLOW_FRACTION * usual[self._kind(link)]
        ]

    def problems(self) -> list[str]:
        """Returns one sentence for each wrong or slow link, and only one for a rank whose links are all slow."""
        found = [
            f"all-reduce: {self._name(rank)} got {wrong} of {self.bytes // 4} numbers wrong"
            for rank, wrong in enumerate(self.all_reduce_wrong)
            if wrong
        ]
        for link in self.links:
            if link.wrong:
                found.append(f"{self._arrow(link)}: {link.wrong} of {link.bytes} bytes wrong")
        return found + self._slow_problems()

    def table(self) -> str:
        """Formats the summary, the matrix of GB/s (a row per sender, a column per receiver), and the problems."""
        lines = [f"interconnect of {len(self.hosts)} ranks on {self.device}: {self.verdict}"]
        if self.links:
            lines += self._summary()
        if self.links and len(self.hosts) <= _MAX_TABLE_RANKS:
            lines += self._matrix()
        return "\n".join([*lines, *self.problems()])

    def to_dict(self) -> dict[str, object]:
        """Returns everything, with verdict and problems, as plain values for JSON."""
        return {**asdict(self), "verdict": self.verdict, "problems": self.problems()}

    def _kind(self, link: Link) -> str:
        same = self.hosts[link.sender] == self.hosts[link.receiver]
        return "inside a machine" if same else "between machines"

    def _kinds(self) -> dict[str, list[Link]]:
        kinds: dict[str, list[Link]] = {}
        for link in self.links:
            kinds.setdefault(self._kind(link), []).append(link)
        return kinds

    def _usual(self) -> dict[str, float]:
        kinds = self._kinds().items()
        return {kind: median(link.gigabytes_per_second for link in links) for kind, links in kinds}

    def _slow_problems(self) -> list[str]:
        slow, usual, others = self.slow_links(), self._usual(), len(self.hosts) - 1
        ends = Counter(rank for link in slow for rank in (link.sender, link.receiver))
        suspects = {rank for rank, count in ends.items() if count == 2 * others}
        if others == 1:  # between two ranks, either could be the slow one
            suspects = set()
        found = [f"{self._name(rank)}: slow to and from every other rank" for rank in sorted(suspects)]
        for link in slow:
            if not {link.sender, link.receiver} & suspects:
                kind = self._kind(link)
                speeds = f"{link.gigabytes_per_second:.2f} GB/s, where {usual[kind]:.2f} is usual {kind}"
                found.append(f"{self._arrow(link)}: {speeds}")
        return found

    def _summary(self) -> list[str]:
        lines = [f"all-reduce of {self.bytes // 2**20} MiB: {self.all_reduce:.2f} GB/s bus bandwidth"]
        for kind, links in self._kinds().items():
            speeds = [link.gigabytes_per_second for link in links]
            latency = median(link.microseconds for link in links)
            lines.append(
                f"{kind}: {len(links)} links, median {median(speeds):.2f} GB/s, "
                f"slowest {min(speeds):.2f} GB/s, latency {latency:.0f} us"
            )
        return lines

    def _matrix(self) -> list[str]:
        ranks = range(len(self.hosts))
        marks = {(link.sender, link.receiver): "!" for link in self.slow_links()}
        marks |= {(link.sender, link.receiver): "X" for link in self.links if link.wrong}
        speeds = {(link.sender, link.receiver): link.gigabytes_per_second for link in self.links}
        lines = ["GB/s  " + "".join(f"{rank:>9}" for rank in ranks) + "   (! slow, X wrong)"]
        for sender in ranks:
            cells = "".join(
                f"{speeds[sender, to]:>8.2f}{marks.get((sender, to), ' ')}" if sender != to else f"{'-':>8} "
                for to in ranks
            )
            lines.append(f"{sender:>5} {cells}  {self.hosts[sender]}")
        return lines

    def _arrow(self, link: Link) -> str:
        return f"{self._name(link.sender)} -> {self._name(link.receiver)}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self.hosts[rank]})"


class Transport(Protocol):
    """Moves bytes between ranks: the process group, or a faulty substitute in a test. Calls return when done."""

    device: torch.device

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, tensor: Tensor, sender: int) -> None: ...

    def all_reduce(self, tensor: Tensor) -> None: ...


@final
class ProcessGroupTransport:
    """The default process group: NCCL between GPUs where it has NCCL, else gloo between CPUs."""

    def __init__(self) -> None:
        nccl = "cuda:nccl" in td.get_backend_config()
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def send(self, tensor: Tensor, to: int) -> None:
        self._transfer(td.P2POp(td.isend, tensor, to))

    def receive(self, tensor: Tensor, sender: int) -> None:
        self._transfer(td.P2POp(td.irecv, tensor, sender))

    def all_reduce(self, tensor: Tensor) -> None:
        td.all_reduce(tensor)
        self._finish()

    def _transfer(self, operation: td.P2POp) -> None:
        # The batched form uses the group's communicator; with plain send and recv NCCL builds one per pair.
        for work in td.batch_isend_irecv([operation]):
            work.wait()
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_interconnect(*, megabytes: int = 16, transport: Transport | None = None) -> Interconnect:
    """Sends known bytes over every link of the default process group and times them. All ranks must call it.

    Returns the same result on all ranks, or raises RankFailure when a peer has exited or does not respond within the
    group's timeout. `transport` replaces the process group, so that tests can make a link slow or wrong.

        result = dist.check_interconnect()
        if hw.is_root():
            print(result.table())
    """
    if megabytes < 1:
        raise UsageError(f"megabytes={megabytes} is too little to measure a link: give at least 1")
    size = megabytes * 2**20
    if rank_and_size()[1] == 1:
        return Interconnect(
            hosts=[socket.gethostname()],
            device="cpu",
            bytes=size,
            all_reduce=0.0,
            all_reduce_wrong=[0],
            links=[],
        )
    transport = ProcessGroupTransport() if transport is None else transport
    exchange = _exchange()
    return _measure(transport, exchange, exchange.all_gather(socket.gethostname), size)


def _measure(transport: Transport, exchange: RankExchange, hosts: Sequence[str], size: int) -> Interconnect:
    seconds, sums_wrong = _canary(transport, size)
    sent: dict[int, tuple[float, float]] = {}
    wrong: dict[int, int] = {}
    rounds = schedule(hosts)
    for number, pairs in enumerate(rounds, 1):
        failpoint("interconnect.round")
        try:
            for sender, receiver in [*pairs, *((b, a) for a, b in pairs)]:
                if sender == td.get_rank():
                    sent[receiver] = _send_timed(transport, receiver, size)
                elif receiver == td.get_rank():
                    wrong[sender] = _receive_checked(transport, sender, size)
            # a barrier: rounds that overlap would slow each other down
            transport.all_reduce(_token(transport))
        except RuntimeError as error:  # what gloo and NCCL raise when a peer has exited or does not respond
            where = _where(f"round {number} of {len(rounds)}", pairs, hosts)
            raise RankFailure(f"the interconnect check stopped in {where}: {error}") from error
    own: dict[str, Any] = {
        "sent": [*sent.items()],
        "wrong": [*wrong.items()],
        "sums": sums_wrong,
        "seconds": seconds,
    }
    reports = exchange.all_gather(lambda: own)
    ranks = range(len(hosts))
    slowest = max(report["seconds"] for report in reports)
    return Interconnect(
        hosts=hosts,
        device=transport.device.type,
        bytes=size,
        all_reduce=2 * (len(hosts) - 1) / len(hosts) * size / slowest / 1e9,
        all_reduce_wrong=[report["sums"] for report in reports],
        links=[_link(reports, a, b, size) for a in ranks for b in ranks if a != b],
    )


def _where(round_: str, pairs: Sequence[Pair], hosts: Sequence[str]) -> str:
    rank = td.get_rank()
    peers = [peer for pair in pairs if rank in pair for peer in pair if peer != rank]
    partner = f"was paired with rank {peers[0]} (host {hosts[peers[0]]})" if peers else "was not paired"
    return f"{round_}, where rank {rank} (host {hosts[rank]}) {partner}"


def _link(reports: Sequence[Any], sender: int, receiver: int, size: int) -> Link:
    seconds, latency = dict(reports[sender]["sent"])[receiver]
    return Link(
        sender=sender,
        receiver=receiver,
        gigabytes_per_second=size / seconds / 1e9,
        microseconds=latency * 1e6,
        bytes=size,
        wrong=dict(reports[receiver]["wrong"])[sender],
    )


def _canary(transport: Transport, size: int) -> tuple[float, int]:
    """Returns the seconds of the fastest of some all-reduces, and how many sums the worst one got wrong."""
    rank, world = td.get_rank(), td.get_world_size()
    base = torch.arange(size // 4, device=transport.device).remainder_(97).float()
    expected = base * world + world * (world - 1) // 2
    best, wrong = float("inf"), 0
    for _ in range(1 + _REPEATS):  # the first also sets up the connections
        numbers = base + rank
        start = time.perf_counter()
        transport.all_reduce(numbers)
        best = min(best, time.perf_counter() - start)
        wrong = max(wrong, int((numbers != expected).sum()))
    return best, wrong


def _send_timed(transport: Transport, to: int, size: int) -> tuple[float, float]:
    """Returns the seconds that the payload took, up to the receiver's reply, and half of those of a round trip."""
    payload, token = _pattern(td.get_rank(), to, size).to(transport.device), _token(transport)

    def trip(what: Tensor) -> float:
        start = time.perf_counter()
        transport.send(what, to)
        transport.receive(token, to)
        return time.perf_counter() - start

    latency = min(trip(token) for _ in range(_PINGS)) / 2
    times = []
    for _ in range(_REPEATS):
        times.append(trip(payload))
        transport.receive(token, to)  # the receiver has compared the bytes and is ready
    return max(min(times) - latency, 1e-9), latency


def _receive_checked(transport: Transport, sender: int, size: int) -> int:
    """Receives what `_send_timed` sends; returns how many bytes were wrong in the worst transfer."""
    expected, token = _pattern(sender, td.get_rank(), size).to(transport.device), _token(transport)
    for _ in range(_PINGS):
        transport.receive(token, sender)
        transport.send(token, sender)
    wrong = 0
    for _ in range(_REPEATS):
        arrived = torch.zeros_like(expected)
        transport.receive(arrived, sender)
        transport.send(token, sender)
        wrong = max(wrong, int((arrived != expected).sum()))
        transport.send(token, sender)
    return wrong


def _pattern(sender: int, receiver: int, size: int) -> Tensor:
    """Returns aperiodic bytes that are unique to this link: bytes of another position or link count as wrong."""
    generator = torch.Generator().manual_seed(derive_seed(sender, "interconnect", receiver))
    return torch.empty(size // 8, dtype=torch.int64).random_(generator=generator).view(torch.uint8)


def _token(transport: Transport) -> Tensor:
    return torch.zeros(1, device=transport.device)


def _exchange() -> RankExchange:
    """Returns an exchange that also works in a process group that headway did not make, through its default store."""
    store = None if is_initialized() else td.distributed_c10d._get_default_store()
    return RankExchange("check the interconnect", store=store)
