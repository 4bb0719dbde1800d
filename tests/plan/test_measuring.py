"""Calibration from measured numbers: pure functions, fed with known truths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node
from headway.plan.tracer.kernels import Kernel
from headway.plan.tracer.measurement import (
    Rows,
    _batch_order,
    _catalog_device,
    describe_machine,
    find_anomalies,
    fit_calibration,
)
from headway.plan.tracer.result import TraceResult

NODE = Node("h200-sxm1")


HOST = {"forward": 30e-6, "backward": 10e-6, "optimizer": 200e-6}
"""seconds of a slow host per kernel"""


def trace_of(samples: int) -> TraceResult:
    """Two thousand kernels whose work grows with the batch, and an optimizer whose work does not."""
    product, others, update = (
        Kernel("mm", 1e9 * samples, 10_000),
        Kernel("add", 0.0, 400_000 * samples),
        Kernel("adam", 0.0, 10**8),
    )
    queue = [("forward", product), ("forward", others)] * 400
    queue += [("backward", product), ("backward", others)] * 600 + [("optimizer", update)] * 20
    return TraceResult(
        kernel_counts={kernel: float(count) for kernel, count in Counter(k for _, k in queue).items()},
        queue=queue,
    )


def real(samples: int, *, slower: float, host: dict[str, float], room: int = 1024) -> dict[str, Any]:
    """What a device `slower` than its roofline would be seen to do behind such a host, played with events.

    The host goes on as long as there is room for another kernel in the queue, and waits when there is none.
    """
    found, truth = trace_of(samples), Calibration(kernel_s=1e-12)
    done: list[float] = []
    now, took = 0.0, dict.fromkeys(host, 0.0)
    for phase, kernel in found.queue:
        before = now
        now += host[phase]
        if len(done) >= room:
            now = max(now, done[-room])
        took[phase] += now - before
        start = max(done[-1], now) if done else now
        done.append(start + slower * TraceResult(kernel_counts={kernel: 1.0}).step_s(NODE, truth))
    return {"batch_size": samples, "step_s": done[-1], "host_s": took}


def fitted(rows: list[dict[str, Any]], chosen: int) -> tuple[Calibration, list[str]]:
    sizes = {row["batch_size"] for row in rows}
    measured: Rows = {size: [row for row in rows if row["batch_size"] == size] for size in sizes}
    return fit_calibration({size: trace_of(size) for size in sizes}, measured, chosen, NODE, Calibration())


def noisy(row: dict[str, Any], times: float) -> dict[str, Any]:
    return {**row, "host_s": {phase: times * seconds for phase, seconds in row["host_s"].items()}}


@pytest.mark.parametrize("pace", [0.2, 1.0])
@pytest.mark.parametrize("slower", [1.0, 1.6])
def test_one_measured_batch_predicts_the_others(pace: float, slower: float) -> None:
    """Among them those with which the host has to wait for room in the queue."""
    host = {phase: pace * seconds for phase, seconds in HOST.items()}
    truth = {size: real(size, slower=slower, host=host) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    assert truth[256]["host_s"]["backward"] > 3 * truth[1]["host_s"]["backward"]
    for chosen in (64, 128, 256):
        constants, notes = fitted([truth[1], truth[chosen]], chosen)
        assert constants.scale == pytest.approx(slower, rel=1e-2) and not notes
        for size, row in truth.items():
            assert trace_of(size).step_s(NODE, constants) == pytest.approx(row["step_s"], rel=0.02), (
                chosen,
                size,
            )


@pytest.mark.parametrize("times", [0.6, 1.8])
def test_one_noisy_row_does_not_set_the_pace(times: float) -> None:
    truth = {size: real(size, slower=1.3, host=HOST) for size in (1, 8, 64)}
    for noise in (0, 2, 3):
        rows = [
            noisy(row, times if i == noise else 1.0) for i, row in enumerate(truth[n] for n in (1, 64, 1, 1))
        ]
        constants, _ = fitted(rows, 64)
        assert trace_of(8).step_s(NODE, constants) == pytest.approx(truth[8]["step_s"], rel=0.01)


def test_on_a_cpu_the_smallest_batch_tells_what_a_launch_costs() -> None:
    constants, _ = fitted([{"batch_size": 1, "step_s": 0.5}, {"batch_size": 64, "step_s": 4.0}], 64)
    assert trace_of(64).step_s(NODE, constants) == pytest.approx(4.0, rel=1e-6)
    assert trace_of(1).step_s(NODE, constants) == pytest.approx(0.5, rel=0.2)


def test_a_batch_that_the_host_held_up_says_nothing_of_the_device() -> None:
    constants, notes = fitted([real(1, slower=1.0, host=HOST)], 1)
    assert constants.scale == 1.0
    assert len(notes) == 1 and notes[0].startswith("the device waited for the host with a batch of 1")
    assert notes[0].endswith("calibrate with a larger batch_size")


def test_more_work_in_less_time_is_doubted() -> None:
    rows: Rows = {
        8: [{"step_s": 0.2}],
        2: [{"step_s": 0.1}, {"step_s": 0.9}, {"step_s": 0.11}],
        32: [{"step_s": 0.1}],
    }
    assert [note.partition(":")[0] for note in find_anomalies(rows)] == [
        "a batch of 32 took less time than one of 8"
    ]
    assert find_anomalies({None: [{"step_s": 0.1}]}) == []


def test_the_smallest_batch_is_measured_three_times() -> None:
    assert _batch_order([8, 4, 16]) == [2, 8, 2, 4, 16, 2]
    assert _batch_order([8, 1]) == [1, 8, 1, 1]
    assert _batch_order([8]) == [2, 8, 2, 2]
    assert _batch_order([1]) == [1, 1, 1]
    assert _batch_order([None]) == [None]


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
    node, constants = describe_machine(facts)
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
    node, constants = describe_machine(facts)
    assert isinstance(node["device"], dict) and node["device"]["bf16"] == 100.0
    assert constants.matrix == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("driver", "device"),
    [
        ("NVIDIA H200", "h200-sxm-141"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B200", "b200-sxm-180"),
        ("NVIDIA GB200", "gb200-186"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", "mi300x-192"),
        ("Some GPU", None),
    ],
)
def test_the_name_of_a_driver_stands_for_one_device_or_for_none(driver: str, device: str | None) -> None:
    found = _catalog_device(driver)
    assert (found and found.name) == device
