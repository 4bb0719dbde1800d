"""Checks whether nodes are fit to train together, from the report of each node and measurements between them.

The same check on all nodes becomes one line, which names the nodes where it is not ok. Comparisons have their own
lines: versions, rates of storage, speeds of GPUs, links, clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, final

from headway.doctor.checks import SEVERITY, CheckResult, CheckVerdict, bad, ok, warn, worst
from headway.system.text import plural, shorten_list

if TYPE_CHECKING:
    from headway.dist.topology.clocks import ClockOffset
    from headway.dist.topology.interconnect import Interconnect

_SLOW_FRACTION = 0.5
"""of the median: nodes that read or write more slowly are named"""
_SLOW_GPU_FRACTION = 0.85
"""of the median: the slowest GPU sets the pace of a synchronous step"""
_SLOW_DISK = 50.0
"""MB/s below which checkpoints hold up a run"""
_SKEW_S = 1.0
_NAMED = 4
_MUST_AGREE = ("headway", "torch", "CUDA", "NCCL")
"""ranks with different versions of these fail when they join, or cannot read each other's messages"""


@final
@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The report of one node. Rates are in MB/s; `gpus` are NVML samples under load."""

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[CheckResult] = ()
    rates: Mapping[str, float | str] = field(default_factory=dict)
    """of storage, by operation; the error message if it failed"""
    gpus: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NodeReport:
        """Makes a report from the plain values that another rank sent."""
        return cls(**{**values, "checks": [CheckResult(**each) for each in values["checks"]]})


@final
@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """The results of all checks of several nodes."""

    nodes: Sequence[NodeReport]
    checks: Sequence[CheckResult]
    interconnect: Mapping[str, Any]

    @property
    def verdict(self) -> CheckVerdict:
        """The worst verdict of all checks."""
        return worst(check.verdict for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {"verdict": self.verdict, **asdict(self)}


def judge(
    nodes: Sequence[NodeReport],
    *,
    speeds: Sequence[float | None],
    links: Interconnect,
    clocks: Sequence[ClockOffset],
    rank_hosts: Sequence[str],
) -> ClusterReport:
    """Turns measurements into verdicts. `speeds` are the TFLOP/s of each rank's GPU, None without a GPU."""
    names = dict.fromkeys(check.name for node in nodes for check in node.checks)
    found = [versions({node.host: node.versions for node in nodes})]
    for name in names:
        at = {node.host: check for node in nodes for check in node.checks if check.name == name}
        found.append(combine(at))
    for what in dict.fromkeys(what for node in nodes for what in node.rates):
        found.append(
            storage_rate(what, {node.host: node.rates[what] for node in nodes if what in node.rates})
        )
    if any(speed is not None for speed in speeds):
        found.append(gpu_speed(speeds, rank_hosts))
    found += [interconnect(links), clock_skew(clocks, rank_hosts)]
    return ClusterReport(nodes=nodes, checks=found, interconnect=links.to_dict())


def combine(found: Mapping[str, CheckResult]) -> CheckResult:
    """Combines the results of one check on several hosts: the worst verdict, and the nodes that have it.

    >>> combine({"n1": ok("CPUs", "64"), "n2": ok("CPUs", "64")}).detail
    '64'
    """
    first = max(found.values(), key=lambda check: SEVERITY[check.verdict])
    hosts = [host for host, check in found.items() if check.verdict == first.verdict]
    details = {check.detail for check in found.values()}
    if first.verdict == "ok" or len(details) == 1:
        same = len(details) == 1
        detail = first.detail if same else f"{first.detail} (on {hosts[0]}; ok on all {len(found)} nodes)"
        return CheckResult(name=first.name, verdict=first.verdict, detail=detail, advice=first.advice)
    detail = "; ".join(f"{host}: {found[host].detail}" for host in hosts[:_NAMED])
    more = f"; and on {plural(len(hosts) - _NAMED, 'more node')}" if len(hosts) > _NAMED else ""
    return CheckResult(name=first.name, verdict=first.verdict, detail=detail + more, advice=first.advice)


def versions(found: Mapping[str, Mapping[str, str]]) -> CheckResult:
    """Checks that all nodes have the same versions."""
    differ, must = [], False
    for name in dict.fromkeys(name for each in found.values() for name in each):
        hosts: dict[str, list[str]] = {}
        for host, each in found.items():
            hosts.setdefault(each.get(name, "none"), []).append(host)
        if len(hosts) > 1:
            common_last = sorted(hosts.items(), key=lambda item: len(item[1]))
            where = ", ".join(f"{version} on {shorten_list(on, _NAMED)}" for version, on in common_last)
            differ.append(f"{name} {where}")
            must = must or name in _MUST_AGREE
    if not differ:
        return ok(
            "versions", ", ".join(f"{name} {text}" for name, text in next(iter(found.values())).items())
        )
    advice = "start all nodes from one environment on a shared file system, or install the same versions"
    return (bad if must else warn)("versions", "; ".join(differ), advice)


def storage_rate(what: str, found: Mapping[str, float | str]) -> CheckResult:
    """Checks a rate of storage by host, in MB/s; a string in place of a rate is that node's error.

    >>> storage_rate("data read: /data", {"n1": 900.0, "n2": 1100.0}).detail
    '/data: 1,000 MB/s on each of 2 nodes'
    """
    name, _, place = what.partition(": ")
    failed = [f"{host}: {why}" for host, why in found.items() if isinstance(why, str)]
    if failed:
        return bad(name, "; ".join(failed[:_NAMED]), "every node needs it: check mounts and permissions")
    rates = {host: rate for host, rate in found.items() if not isinstance(rate, str)}
    usual = median(rates.values())
    slow = [f"{host} {rate:,.0f}" for host, rate in rates.items() if rate < _SLOW_FRACTION * usual]
    detail = f"{place + ': ' if place else ''}{usual:,.0f} MB/s on each of {plural(len(rates), 'node')}"
    if slow:
        advice = "these nodes hold up all others: leave them out (--extra exclude=NODE), and report them"
        return warn(name, f"{detail}, but {shorten_list(slow, _NAMED)}", advice)
    if usual < _SLOW_DISK:
        return warn(name, detail, "data and checkpoints will hold up training: use a parallel file system")
    return ok(name, detail)


def gpu_speed(speeds: Sequence[float | None], hosts: Sequence[str]) -> CheckResult:
    """Checks the speed of a matrix product on each rank's GPU, in TFLOP/s, against the median."""
    known = [speed for speed in speeds if speed is not None]
    usual = median(known)
    slow = [
        f"rank {rank} (host {hosts[rank]}) {speed:,.0f}"
        for rank, speed in enumerate(speeds)
        if speed is not None and speed < _SLOW_GPU_FRACTION * usual
    ]
    detail = f"{usual:,.0f} TFLOP/s on each of {plural(len(known), 'GPU')}"
    if slow:
        advice = "every step waits for these: leave their nodes out (--extra exclude=NODE), and report them"
        return warn("GPU speed", f"{detail}, but {shorten_list(slow, _NAMED)}", advice)
    return ok("GPU speed", f"{detail} (matrix product in fp16)")


def interconnect(found: Interconnect) -> CheckResult:
    """Checks the links between ranks: corrupted bytes are bad, slow links are a warning."""
    problems = found.problems()
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    detail = "; ".join(problems[:_NAMED]) + more
    if found.verdict == "wrong":
        return bad("interconnect", detail, "do not train on these nodes: report these lines to the site")
    if found.verdict == "slow":
        advice = "if the nodes are idle, leave the slow one out (--extra exclude=NODE), and report it"
        return warn("interconnect", detail, advice)
    if not found.links:
        return ok("interconnect", "one rank, no links")
    slowest = min(link.gigabytes_per_second for link in found.links)
    return ok(
        "interconnect",
        f"{plural(len(found.hosts), 'rank')} on {found.device}: all bytes correct, slowest link {slowest:.2f} "
        f"GB/s, all-reduce {found.all_reduce:.2f} GB/s",
    )


def clock_skew(found: Sequence[ClockOffset], hosts: Sequence[str]) -> CheckResult:
    """Checks that the clocks of the nodes agree, within the uncertainty of the measurement."""
    far = [
        f"{hosts[each.rank]} {each.certain_s:.1f} s {'ahead' if each.offset_s > 0 else 'behind'}"
        for each in found
        if each.certain_s > _SKEW_S
    ]
    if far:
        advice = "silent-run reports and checkpoint ages will be wrong: ask the site to synchronize clocks"
        return warn("clocks", f"compared with {hosts[0]}: {shorten_list(far, _NAMED)}", advice)
    if not found:
        return ok("clocks", "one node")
    most = max(abs(each.offset_s) + each.error_s for each in found)
    return ok("clocks", f"{plural(len(found) + 1, 'node')} agree within {max(most, 1e-3) * 1000:,.0f} ms")
