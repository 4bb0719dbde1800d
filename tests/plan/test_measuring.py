"""Calibration from measured numbers: pure functions, fed with known truths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headway.plan.calibration import Calibration
from headway.plan.hardware import Node
from headway.plan.measuring import fit, machine
from headway.plan.traced import Traced

NODE = Node("h200-sxm1")


HOST = {"forward": 30e-6, "backward": 10e-6, "optimizer": 200e-6}
"""seconds of a slow host per kernel"""


def trace_of(samples: int) -> Traced:
    """Two thousand kernels whose work grows with the batch, and an optimizer whose work does not."""
    product, others, update = (
        ("mm", 1e9 * samples, 10_000),
        ("add", 0.0, 400_000 * samples),
        ("adam", 0.0, 10**8),
    )
    queue = [("forward", product), ("forward", others)] * 400
    queue += [("backward", product), ("backward", others)] * 600 + [("optimizer", update)] * 20
    return Traced(
        work={kernel: float(count) for kernel, count in Counter(k for _, k in queue).items()}, queue=queue
    )


def real(samples: int, *, slower: float, host: dict[str, float]) -> dict[str, Any]:
    """What a device `slower` than its roofline would be seen to do behind such a host, played with events."""
    found, truth = trace_of(samples), Calibration(kernel_s=1e-12)
    free = now = 0.0
    for phase, kernel in found.queue:
        now += host[phase]
        free = max(free, now) + slower * Traced(work={kernel: 1.0}).step_s(NODE, truth)
    launches = Counter(phase for phase, _ in found.queue)
    return {"step_s": free, "host_s": {phase: host[phase] * count for phase, count in launches.items()}}


@pytest.mark.parametrize("pace", [0.2, 1.0])
@pytest.mark.parametrize("slower", [1.0, 1.6])
def test_one_measured_batch_predicts_the_others(pace: float, slower: float) -> None:
    host = {phase: pace * seconds for phase, seconds in HOST.items()}
    known: dict[int | None, Any] = {size: real(size, slower=slower, host=host) for size in (1, 64)}
    fitted = fit({1: trace_of(1), 64: trace_of(64)}, known, 64, NODE, Calibration())
    assert fitted.scale == pytest.approx(slower, rel=1e-3)
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        predicted = trace_of(size).step_s(NODE, fitted)
        assert predicted == pytest.approx(real(size, slower=slower, host=host)["step_s"], rel=0.01), size


def test_on_a_cpu_the_smallest_batch_tells_what_a_launch_costs() -> None:
    rows: dict[int | None, Any] = {1: {"step_s": 0.5}, 64: {"step_s": 4.0}}
    fitted = fit({1: trace_of(1), 64: trace_of(64)}, rows, 64, NODE, Calibration())
    assert trace_of(64).step_s(NODE, fitted) == pytest.approx(4.0, rel=1e-6)
    assert trace_of(1).step_s(NODE, fitted) == pytest.approx(0.5, rel=0.2)


def test_a_batch_that_the_host_held_up_says_nothing_of_the_device() -> None:
    row = real(1, slower=1.0, host=HOST)
    assert fit({1: trace_of(1)}, {1: row}, 1, NODE, Calibration()).scale == 1.0


def test_a_known_device_keeps_its_data_sheet() -> None:
    facts = {
        "device": "NVIDIA H200",
        "gpus": 8,
        "memory_bytes": 150_110_011_392,
        "products_TFLOPS": {"a": 700.0, "b": 600.0},
        "copy_bytes_per_s": 4.239e12,
        "attention_TFLOPS": 400.0,
        "launch_s": 6e-6,
        "collectives": {"1048576": 40e-6, "16777216": 120e-6, "268435456": 1.4e-3},
    }
    node, constants, _ = machine(facts)
    assert node == {"name": "this", "device": "h200-sxm-141", "gpus": 8}
    assert constants.matrix == pytest.approx(650 / (989 * 0.787), rel=1e-3)
    assert constants.memory == pytest.approx(1.0, rel=0.01)
    assert 0.5 < constants.peer < 1.0 and 0 < constants.peer_latency_s < 20e-6
    assert constants.source == "measured on NVIDIA H200"


def test_an_unknown_device_is_described_by_what_it_did() -> None:
    facts = {
        "device": "Some GPU",
        "gpus": 1,
        "memory_bytes": 48e9,
        "products_TFLOPS": {"a": 100.0, "b": 80.0},
        "copy_bytes_per_s": 8e11,
        "attention_TFLOPS": 50.0,
        "launch_s": 6e-6,
    }
    node, constants, _ = machine(facts)
    assert isinstance(node["device"], dict) and node["device"]["bf16"] == 100.0
    assert constants.matrix == pytest.approx(0.9)
