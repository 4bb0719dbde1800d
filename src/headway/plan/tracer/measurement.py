"""Measures real steps on this machine's device, compares them with the prediction, and calibrates the machine."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from headway.errors import HeadwayError, UsageError
from headway.interpreter import import_path, module_command, module_environment
from headway.plan import checks
from headway.plan.machine.calibration import Calibration, calibration_file, load_calibration
from headway.plan.machine.efficiency import default_calibration, scoped_calibration
from headway.plan.machine.hardware import Device, Node, find_device
from headway.plan.tracer.request import (
    FunctionReference,
    function_reference,
    process_failure,
    trace_modules,
)
from headway.plan.tracer.result import TraceResult
from headway.plan.tracer.settings import TraceSettings
from headway.plan.yaml_reader import read_yaml


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured values of one batch size, in bytes and seconds. Memory is measured on GPUs only."""

    batch_size: int | None
    predicted_s: float
    measured_s: float
    predicted_allocated: float
    measured_allocated: float | None
    predicted_reserved: float
    measured_reserved: float | None
    fitted: bool
    """Whether the constants were fitted on this row; its time then does not test them."""

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        return self.predicted_allocated / self.measured_allocated - 1 if self.measured_allocated else None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Predicted and measured values per batch size, and the calibration fitted on the first one."""

    device: str
    rows: list[Comparison]
    calibration: Calibration
    notes: list[str] = field(default_factory=list)
    """Limits of the measurement, and reasons to doubt it."""

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        rows = [
            {**vars(row), "time_error": row.time_error, "memory_error": row.memory_error} for row in self.rows
        ]
        return {
            "device": self.device,
            "rows": rows,
            "calibration": vars(self.calibration),
            "notes": self.notes,
        }


def measure(
    module_factory: FunctionReference,
    example_inputs: FunctionReference | None = None,
    *,
    batch_size: int | None = None,
    also: tuple[int, ...] = (),
    node: Node | None = None,
    calibration: Calibration | None = None,
    steps: int = 10,
    **other: Any,
) -> Measurement:
    """Runs a few steps on this device and compares them with the prediction.

    `batch_size` calibrates the prediction; the batch sizes in `also` test it.

    >>> measure("train.py:make_model", batch_size=8, also=(2, 16))    # doctest: +SKIP
    """
    settings = TraceSettings(
        factory=function_reference(module_factory),
        inputs=None if example_inputs is None else function_reference(example_inputs),
        batch_size=batch_size,
        **{key: function_reference(value) if callable(value) else value for key, value in other.items()},  # type: ignore[arg-type]
    )
    return measure_module(settings, also=also, node=node, calibration=calibration, steps=steps)


def measure_module(
    settings: TraceSettings,
    *,
    also: tuple[int, ...] = (),
    node: Node | None = None,
    calibration: Calibration | None = None,
    steps: int = 10,
    timeout: float = 900.0,
) -> Measurement:
    """Measures the module that `settings` describe; see `measure`."""
    checks.require_int("steps", steps)
    for size in also:
        checks.require_int("also", size)
    if also and settings.batch_size is None:
        raise UsageError("also is given without batch_size; give the batch size that calibrates, too")
    sizes = list(dict.fromkeys([settings.batch_size, *also]))
    order = _batch_order(sizes)
    request = {"kind": "steps", "trace": settings.to_dict(), "steps": steps, "batch_sizes": order}
    result = _probe(request, timeout)
    every = list(dict.fromkeys(order))
    traces = dict(
        zip(every, trace_modules([replace(settings, batch_size=size) for size in every]), strict=True)
    )
    failed = next((found.error for found in traces.values() if found.error), None)
    if failed:
        raise HeadwayError(f"the steps were measured, but could not be predicted: {failed}")
    node = node or _node_named(result["device"])
    constants, _ = scoped_calibration(calibration, node.device)
    measured = {size: [row for row in result["rows"] if row["batch_size"] == size] for size in every}
    fitted, notes = fit_calibration(traces, measured, settings.batch_size, node, constants)
    used = {settings.batch_size, order[0]}
    rows = [
        _comparison(size, traces[size], measured[size], node, fitted, fitted=size in used) for size in sizes
    ]
    return Measurement(
        device=result["device"], rows=rows, calibration=fitted, notes=notes + find_anomalies(measured)
    )


def _batch_order(sizes: list[int | None]) -> list[int | None]:
    """Puts the smallest batch first, in the middle and last: the host's time is fitted on it, and is noisy."""
    given = [size for size in sizes if size is not None]
    if not given:
        return sizes
    smallest = min(2, *given)  # batch norm needs two samples
    others = [size for size in sizes if size != smallest]
    return [smallest, *others[:1], smallest, *others[1:], smallest]


Rows = dict[int | None, list[dict[str, Any]]]


def fit_calibration(
    traces: dict[int | None, TraceResult],
    measured: Rows,
    chosen: int | None,
    node: Node,
    constants: Calibration,
) -> tuple[Calibration, list[str]]:
    """Fits the host's time per kernel, and the device's scale at the batch size `chosen`.

    The host takes the same time for small and large batches, but longer in the forward pass than in the backward pass,
    which runs no Python. The scale makes the predicted step as long as the measured one; it is unknown if the host was
    slower than the device.
    """
    smallest = min(measured, key=lambda size: size or 0)
    source = f"measured with a batch of {chosen}" if chosen else "measured with one batch"
    host = _host(traces[smallest], measured[smallest], measured[chosen])
    names = ("scale", *host, *(name for name in constants.measured if name not in host))
    fitted = replace(constants, source=source, device=node.device.name, measured=names, **host)
    scale = _scale(traces[chosen], _step_s(measured[chosen]), node, fitted)
    if scale is not None:
        return replace(fitted, scale=scale), []
    note = (
        f"the device waited for the host{f' with a batch of {chosen}' if chosen else ''}: its own speed is unknown, "
        "and larger batches may take longer than predicted; calibrate with a larger batch_size"
    )
    return fitted, [note]


def find_anomalies(measured: Rows) -> list[str]:
    """Reports larger batches that took less time than smaller ones."""
    times = sorted((size, _step_s(rows)) for size, rows in measured.items() if size is not None)
    return [
        f"a batch of {large} took less time than one of {small}: other work slows this machine; measure again"
        for (small, more), (large, less) in pairwise(times)
        if less < 0.9 * more
    ]


def _step_s(rows: list[dict[str, Any]]) -> float:
    return float(median(row["step_s"] for row in rows))


def _host(
    found: TraceResult, smallest: list[dict[str, Any]], chosen: list[dict[str, Any]]
) -> dict[str, float]:
    """Fits host seconds per kernel, and their ratio in each phase, on the smallest batch.

    With a large batch, the host waits for room in the launch queue, and in the optimizer for the device. On a CPU, host
    and device are the same, and a single batch size cannot separate them.
    """
    if "host_s" not in smallest[0]:
        return {} if smallest is chosen else {"kernel_s": _step_s(smallest) / found.launches}
    host = {phase: float(median(row["host_s"][phase] for row in smallest)) for phase in smallest[0]["host_s"]}
    launches = Counter(phase for phase, _ in found.queue)
    kernel_s = sum(host.values()) / found.launches
    each = {phase: seconds / launches[phase] for phase, seconds in host.items() if launches[phase]}
    return {"kernel_s": kernel_s} | {f"host_{phase}": seconds / kernel_s for phase, seconds in each.items()}


def _scale(found: TraceResult, seconds: float, node: Node, constants: Calibration) -> float | None:
    """Finds how many times slower than its roofline the device is, by bisection.

    Returns None if the host was slower than the device: then the device's speed is unknown.
    """

    def step_s(scale: float) -> float:
        return found.step_s(node, replace(constants, scale=scale))

    low, high = 1e-3, 1e3
    if step_s(low) > seconds / 1.15:
        return None
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) < seconds else (low, middle)
    return high


def _comparison(
    size: int | None,
    found: TraceResult,
    rows: list[dict[str, Any]],
    node: Node,
    constants: Calibration,
    *,
    fitted: bool,
) -> Comparison:
    row = rows[0]
    return Comparison(
        batch_size=size,
        predicted_s=found.step_s(node, constants),
        measured_s=_step_s(rows),
        predicted_allocated=found.allocated,
        measured_allocated=row.get("allocated"),
        predicted_reserved=found.reserved,
        measured_reserved=row.get("reserved"),
        fitted=fitted,
    )


def calibrate(
    *, directory: Path | None = None, loader: str | None = None, timeout: float = 300.0
) -> tuple[dict[str, object], Calibration, dict[str, Any]]:
    """Measures this machine. Returns the node as in a plan file, the constants, and the raw numbers."""
    with tempfile.TemporaryDirectory(prefix="headway-calibrate-") as own:
        found = _probe({"kind": "machine", "directory": str(directory or own), "loader": loader}, timeout)
    return *describe_machine(found), found


def describe_machine(found: dict[str, Any]) -> tuple[dict[str, object], Calibration]:
    """Turns raw measurements into a node and constants. An unknown device is described by its measured speed."""
    products = found["products_TFLOPS"]
    known = _catalog_device(found["device"])
    best = max(products.values())
    described: object = (
        known.name
        if known
        else {
            "name": found["device"],
            "memory_GB": found["memory_bytes"] / 1e9,
            "usable_GiB": found["memory_bytes"] / 2**30,
            "hbm_GBps": found["copy_bytes_per_s"] / 1e9,
            "hbm_achievable": 1.0,
            "bf16": best,
            "achievable": 1.0,
            "source": "measured",
        }
    )
    chip = find_device(described)
    typical = sum(products.values()) / len(products)
    rate = chip.matrix_flops("bf16") / 1e12
    own = {
        "matrix": min(1.0, typical / rate),
        "attention": min(1.0, found["attention_TFLOPS"] * 1e12 / chip.attention_flops),
        "memory": min(1.2, found["copy_bytes_per_s"] / chip.copy_bytes_per_s),
        "kernel_s": found["launch_s"],
        **_peer(found, chip),
    }
    constants = replace(
        default_calibration(chip),
        source=f"measured on {found['device']}",
        device=chip.name,
        measured=tuple(own),
        **own,
    )
    return {"name": "this", "device": described, "gpus": found["gpus"]}, constants


def _peer(found: dict[str, Any], chip: Device) -> dict[str, float]:
    """Fits latency and bandwidth of a ring on the smallest and the largest all-reduce between the GPUs."""
    times = {int(size): float(seconds) for size, seconds in (found.get("collectives") or {}).items()}
    if len(times) < 2:
        return {}
    ranks = found["gpus"]
    small, large = min(times), max(times)
    moved = 2 * (ranks - 1) / ranks
    rate = moved * (large - small) / (times[large] - times[small])
    latency = max(1e-7, (times[small] - moved * small / rate) / (2 * (ranks - 1)))
    return {"peer": min(1.0, rate / chip.peer_bytes_per_s), "peer_latency_s": latency}


_DRIVER_NAMES = {
    "H200": "h200-sxm-141",
    "H100 80GB HBM3": "h100-sxm-80",
    "H100 PCIe": "h100-pcie-80",
    "A100-SXM4-80GB": "a100-sxm-80",
    "A100-SXM4-40GB": "a100-sxm-40",
    "B200": "b200-sxm-180",
    "GB200": "gb200-186",
    "B300": "b300-sxm-288",
    "B300 SXM6 AC": "b300-sxm-288",
    "GB300": "gb300-288",
    "L40S": "l40s-48",
    "RTX 4090": "rtx-4090-24",
    "V100-SXM2-32GB": "v100-sxm2-32",
    "MI300X": "mi300x-192",
    "MI300X OAM": "mi300x-192",
    "MI300X VF": "mi300x-192",
    "MI325X": "mi325x-256",
    "MI325X OAM": "mi325x-256",
    "MI355X": "mi355x-288",
    "MI355X OAM": "mi355x-288",
}
"""Names that drivers report, without the vendor, and the devices of the catalog."""


def _catalog_device(name: str) -> Device | None:
    """Finds the catalog's device for the name that the driver reports; None if the catalog does not have it.

    The name must end with the complete words of an entry: a GH200, an H200 NVL and a slice of an H200 do not match.
    """
    found = (entry for words, entry in _DRIVER_NAMES.items() if f" {name}".endswith(f" {words}"))
    return next((find_device(entry) for entry in found), None)


def machine_here(name: str) -> tuple[Node, Calibration]:
    """Returns node and constants for this machine's device: as written by `calibrate`, or from the catalog."""
    known, file = _catalog_device(name), calibration_file()
    if file.is_file():
        given = read_yaml(file, what="a calibration file").get("node")
        node = Node.of(**checks.require_mapping(f"{file}: node", given))  # type: ignore[arg-type]
        if node.device.name == (known.name if known else name):
            return node, scoped_calibration(load_calibration(file), node.device)[0]
    if known is None:
        raise UsageError(
            f"the device {name!r} is not in the catalog; measure it once: headway plan calibrate"
        )
    return Node.of(name=name, device=known.name, gpus=1), default_calibration(known)


def _node_named(name: str) -> Node:
    known = _catalog_device(name)
    if known is not None:
        return Node.of(name=name, device=known.name, gpus=1)
    # without a data sheet only ratios matter: the fitted scale absorbs the rest
    chip = {"name": name, "memory_GB": 16, "hbm_GBps": 20, "bf16": 0.1, "achievable": 1.0}
    return Node.of(name=name, device=chip, gpus=1)


def _probe(request: dict[str, object], timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headway-probe-") as directory:
        out = Path(directory) / "result.json"
        try:
            done = subprocess.run(
                module_command("headway.plan.tracer.probe", str(out)),
                env=module_environment(),
                input=json.dumps({"import_path": import_path(), **request}),
                capture_output=True,
                text=True,
                errors="replace",  # the user's code may write any bytes
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HeadwayError(
                f"the measurement took longer than {timeout:.0f} s; measure a smaller batch"
            ) from error
        if not out.exists():
            raise HeadwayError(f"the measuring process {process_failure(done)}")
        found: dict[str, Any] = json.loads(out.read_text())
    if "error" in found:
        raise UsageError(str(found["error"]))
    return found
