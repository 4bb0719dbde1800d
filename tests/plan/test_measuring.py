"""Calibration from measured numbers: pure functions, fed with known truths."""

from __future__ import annotations

import pytest

from headway.plan.calibration import Calibration
from headway.plan.hardware import Node
from headway.plan.measuring import fit_scale, machine
from headway.plan.traced import Traced

NODE = Node("h200-sxm1")


def trace_of(samples: int) -> Traced:
    """A thousand kernels whose work grows with the batch."""
    return Traced(
        work={("mm", 1e9 * samples, 10_000 * samples): 500.0, ("add", 0.0, 400_000 * samples): 500.0}
    )


def busy(samples: int) -> float:
    return sum(trace_of(samples).seconds(NODE, Calibration())[:2])


@pytest.mark.parametrize("host", [5e-6, 50e-6])
@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_one_measured_batch_predicts_the_others(host: float, factor: float) -> None:
    """A device that is `factor` slower than its roofline behind a host that needs `host` seconds per kernel."""
    real = {size: max(factor * busy(size), 1000 * host) for size in (1, 2, 4, 8, 16, 32, 64, 128)}
    known: dict[int | None, float] = {1: real[1], 64: real[64]}
    fitted = fit_scale({size: trace_of(size) for size in (1, 64)}, known, 64, NODE, Calibration())  # type: ignore[misc]
    for size, seconds in real.items():
        products, others, launches = trace_of(size).seconds(NODE, fitted)
        predicted = max(products + others, launches) * fitted.scale
        assert predicted == pytest.approx(seconds, rel=0.10), size


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
