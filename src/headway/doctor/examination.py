"""Examines the nodes of a job; each rank runs `python -m headway.doctor.examination RESULT [DATA ...]`.

Every rank tests its links to the others; local rank 0 reports on its node. Rank 0 writes the verdicts to RESULT, as
JSON in the run directory, and prints a line per check. All ranks exit with 1 if a run would fail.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headway
from headway.doctor import checks, probes
from headway.doctor.cluster import ClusterReport, NodeReport, judge
from headway.doctor.storage import TransferRate, time_read, time_write
from headway.system import files

if TYPE_CHECKING:
    from headway.dist.collective.exchange import RankExchange
    from headway.dist.group import World

_FILE_BYTES = 256 << 20
_LOAD_S = 1.0
"""how long each GPU computes before its clocks are read"""
_MATRIX = 8192
_TIMEOUT_S = 120.0


def main(result: str, *data: str, file_bytes: int = _FILE_BYTES) -> int:
    """Examines the nodes of this job together with its other ranks; returns the exit code."""
    from headway import dist

    world = dist.init(setup_timeout=_TIMEOUT_S, step_timeout=_TIMEOUT_S)
    verdict = _examine(world, Path(result), [Path(path) for path in data], file_bytes)
    dist.leave()
    return 1 if verdict == "bad" else 0


def _examine(world: World, result: Path, data: Sequence[Path], file_bytes: int) -> str:
    """Runs one measurement after the other, each on all nodes at once, as in a run."""
    from headway.dist.collective.exchange import RankExchange
    from headway.dist.topology.clocks import measure_clocks
    from headway.dist.topology.interconnect import check_interconnect

    exchange = RankExchange("examine the nodes", timeout_s=_TIMEOUT_S)
    places = exchange.all_gather(lambda: (world.host, world.local_rank))
    hosts, firsts = (
        [host for host, _ in places],
        [rank for rank, (_, local) in enumerate(places) if not local],
    )
    is_first = world.rank in firsts
    rates = _measure_storage(exchange, world.rank, firsts, result.parent, data, file_bytes)
    speed, gpus = _load_gpu(world, sample=is_first)
    used = {each for each in exchange.all_gather(lambda: _uuid(world)) if each}
    gpus = [gpu for gpu in gpus if is_used(gpu, used)]
    own = _node_report(world, result.parent.parent, rates, gpus) if is_first else None
    speeds = exchange.all_gather(lambda: speed)
    nodes = exchange.all_gather(lambda: own and asdict(own))
    links = check_interconnect(megabytes=16 if world.device.type == "cuda" else 4)
    clocks = measure_clocks([rank for rank in firsts if rank])

    def decide() -> str:
        report = judge(
            [NodeReport.from_dict(each) for each in nodes if each],
            speeds=speeds,
            links=links,
            clocks=clocks,
            rank_hosts=hosts,
        )
        _publish(report, result)
        return report.verdict

    return exchange.from_root(decide)


def _uuid(world: World) -> str | None:
    import torch

    on_gpu = world.device.type == "cuda"
    return str(torch.cuda.get_device_properties(world.device).uuid) if on_gpu else None


def is_used(gpu: Mapping[str, Any], used: Collection[str]) -> bool:
    """Returns whether a GPU is used by a rank, or does not respond; a shared node may show GPUs of other jobs.

    >>> is_used({"uuid": "GPU-ab"}, {"ab"}), is_used({"uuid": "GPU-cd"}, {"ab"}), is_used({"error": "lost"}, {"ab"})
    (True, False, True)
    """
    return not used or "uuid" not in gpu or any(str(gpu["uuid"]).endswith(each) for each in used)


def _node_report(
    world: World, root: Path, rates: dict[str, float | str], gpus: Sequence[dict[str, Any]]
) -> NodeReport:
    found, _ = checks.examine_node(root, gpus)
    return NodeReport(host=world.host, versions=own_versions(), checks=found, rates=rates, gpus=gpus)


def own_versions() -> dict[str, str]:
    """Returns the versions that must or should be equal on all nodes."""
    import torch

    from headway.dist.topology.nvml import read_driver

    found = {"headway": headway.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        with suppress(RuntimeError, AttributeError):  # built without NCCL
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if driver := read_driver():
        found["driver"] = driver.version
    return found


def _measure_storage(
    exchange: RankExchange, rank: int, firsts: Sequence[int], directory: Path, data: Sequence[Path], size: int
) -> dict[str, float | str]:
    """Measures, on local rank 0 of each node, writing a file, reading the file of the next node, and reading data.

    A node's own file may still be in its page cache; the file of another node is not.
    """
    paths = {each: directory / f".storage-{each:05d}.bin" for each in firsts}
    rates: dict[str, float | str] = {}

    def measure(what: str, action: Any) -> None:
        exchange.all_gather(lambda: None)  # all nodes at once, as in a run
        if rank in paths:
            rates[what] = _rate(action)

    try:
        measure("run write", lambda: time_write(paths[rank], size))
        exchange.all_gather(lambda: None)
        next_one = dict(zip(firsts, [*firsts[1:], firsts[0]], strict=True))
        measure("run read", lambda: files.retry_until_visible(lambda: time_read(paths[next_one[rank]], size)))
        exchange.all_gather(lambda: None)
    finally:
        if rank in paths:
            paths[rank].unlink(missing_ok=True)
    for place in data:
        measure(f"data read: {place}", lambda place=place: time_read(place, size))
    return rates


def _rate(action: Any) -> float | str:
    try:
        measured: TransferRate = action()
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return measured.megabytes_per_second if measured.bytes else "there is nothing to read"


def _load_gpu(world: World, *, sample: bool) -> tuple[float | None, list[dict[str, Any]]]:
    """Returns the TFLOP/s of this rank's GPU, and samples of the node's GPUs while they compute."""
    import torch

    if world.device.type != "cuda":
        return None, probes.sample_gpus() if sample else []
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.float16, device=world.device) for _ in range(2))

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b)
        if count > 1 and sample:  # the kernels are queued: the GPUs are busy now
            samples.extend(probes.sample_gpus())
        torch.cuda.synchronize()
        return time.perf_counter() - start

    samples: list[dict[str, Any]] = []
    seconds(1)  # warm-up: it loads the library
    count = max(2, min(10_000, int(_LOAD_S / max(seconds(1), 1e-6))))
    seconds(count)  # until clocks and temperature have settled
    samples.clear()
    return 2 * _MATRIX**3 * count / seconds(count) / 1e12, samples


def _publish(report: ClusterReport, result: Path) -> None:
    with files.storage(f"write {result}"):
        files.write_atomic(result, json.dumps(report.to_dict(), indent=2).encode())
    print("\n".join(checks.line(check) for check in report.checks), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
