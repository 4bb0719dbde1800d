"""The economy of a run: checkpoints, failures, data loading, energy, cost. One function per formula."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from headway.plan import checks

LLAMA3_MTBF_GPU_HOURS = 50_700
"""Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The run around the steps: its length, storage, failures and power. The section `job` of a plan file.

    plan = hw.plan.estimate(model, layout, node, workload=hw.plan.Workload(tokens=1e12))
    print(plan.answers["run.gpu_hours"])
    """

    tokens: float | None = None
    """Tokens to train on; for images, give `samples`."""
    samples: float | None = None
    """Images to train on."""
    mtbf_gpu_hours: float = LLAMA3_MTBF_GPU_HOURS
    """Mean GPU-hours between failures; the default is that of Llama 3."""
    restart_s: float = 300
    """Seconds from a failure until the ranks read the checkpoint; reading it is added."""
    storage_GBps: float = 10
    """Write bandwidth of the file system, over all nodes, in decimal gigabytes."""
    writer_GBps: float = 2
    """Write bandwidth of one node."""
    async_checkpoint: bool = True
    """Training waits for the copy to host memory only."""
    sample_bytes: float | None = None
    """Bytes per sample on disk; if not given, 2 per token or 110 kB per image."""
    loader_MBps: float | None = None
    """Measured bandwidth of the data loader of one node, in decimal megabytes."""
    pue: float = 1.2
    """Power usage effectiveness: facility power over machine power."""
    power_share: float = 0.9
    """Fraction of the device's power limit that training draws."""

    def __post_init__(self) -> None:
        for key in ("mtbf_gpu_hours", "restart_s", "storage_GBps", "writer_GBps", "power_share"):
            checks.require_number(f"job.{key}", getattr(self, key))
        for key in ("tokens", "samples", "sample_bytes", "loader_MBps"):
            if getattr(self, key) is not None:
                checks.require_number(f"job.{key}", getattr(self, key))
        checks.require_number("job.pue", self.pue, above=0.999)
        checks.require_bools("job", self)


def checkpoint_bytes(parameters: float, state_bytes_per_parameter: float, gradient_bytes: float) -> float:
    """Bytes of a checkpoint: weights and optimizer state, everything but gradients."""
    return parameters * (state_bytes_per_parameter - gradient_bytes)


def write_seconds(size: float, nodes: int, workload: Workload) -> float:
    """Seconds to write a checkpoint: bytes / min(nodes x node bandwidth, storage bandwidth)."""
    return size / (min(nodes * workload.writer_GBps, workload.storage_GBps) * 1e9)


def young_daly(blocking_s: float, mtbf_s: float) -> float:
    """The optimal time between checkpoints (Daly 2006): sqrt(2 d M)(1 + sqrt(d/2M)/3 + (d/2M)/9) - d.

    >>> round(young_daly(30, 49.5 * 3600) / 60)
    54
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocking_s / (2 * mtbf_s)
    return sqrt(2 * blocking_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - blocking_s


def goodput(blocking_s: float, interval_s: float, restart_s: float, mtbf_s: float) -> float:
    """Fraction of the time that makes progress: t / (M exp(R/M) (exp((t + d)/M) - 1)) (Daly 2006).

    With few failures that is 1 - d/t - (t/2 + R)/M, and it remains right where failures are as frequent as saves.

    >>> round(goodput(30, 54 * 60, 300, 49.5 * 3600), 3)
    0.98
    """
    segment, restart = (interval_s + blocking_s) / mtbf_s, restart_s / mtbf_s
    if segment + restart > 700:  # the exponential is beyond a float: nothing is ever completed
        return 0.0
    return min(1.0, interval_s / mtbf_s / (exp(restart) * expm1(segment)))


def energy_kwh(gpus: int, watts: float, hours: float) -> float:
    """Energy of the accelerators alone; multiply by the PUE for that of the facility."""
    return gpus * watts * hours / 1000
