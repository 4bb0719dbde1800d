"""Products in fp32 have their own rate: far below that of 16 bits, unless they are rounded to TF32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode

import headway as hw
from headway import dist
from headway.plan import Layout, Node, estimate, preset
from headway.plan.cost.compute import attention_seconds
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import default_calibration
from headway.plan.machine.hardware import Device, find_device, node_names
from headway.plan.tracer.kernels import Kernel
from headway.plan.tracer.measurement import describe_machine
from headway.plan.tracer.process.memory_meter import MemoryMeter
from headway.plan.tracer.result import TraceResult, make_estimate
from headway.plan.tracer.settings import TraceSettings

H200 = Node("h200-sxm1")
CPU_FACTS = {
    "device": "cpu",
    "gpus": 1,
    "memory_bytes": 16e9,
    "products_TFLOPS": {"a": 0.2, "b": 0.1},
    "copy_bytes_per_s": 2e10,
    "attention_TFLOPS": 0.05,
    "launch_s": 1e-6,
}


@pytest.fixture
def cublas_setting() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_every_device_of_the_catalog_has_a_rate_in_fp32_of_its_own() -> None:
    """A half (RTX 4090) to a thirty-second (GB200) of 16 bits."""
    for name in node_names():
        device = Node(name).device
        full, tf32, fp32 = (device.matrix_flops(precision) for precision in ("bf16", "tf32", "fp32"))
        assert device.fp32 is not None and fp32 / full == pytest.approx(
            device.fp32 * 1e12 / device.peak_flops
        )
        assert 1 / 32 < fp32 / full <= 0.51, name
        assert tf32 == (fp32 if device.bf16 is None else 0.5 * full), name


def test_a_volta_has_no_tf32_and_a_device_without_a_data_sheet_has_half() -> None:
    volta = find_device("v100-sxm2-32")
    assert volta.matrix_flops("tf32") == volta.matrix_flops("fp32") < volta.matrix_flops("bf16") / 7
    unknown = Device(name="mine", memory_GB=48, hbm_GBps=900, bf16=180)
    assert unknown.matrix_flops("fp32") == unknown.matrix_flops("tf32") == unknown.matrix_flops("bf16") / 2


def test_a_cpu_was_measured_in_fp32() -> None:
    described, _ = describe_machine(CPU_FACTS)
    chip = find_device(described["device"])
    assert chip.matrix_flops("fp32") == chip.matrix_flops("tf32") == chip.matrix_flops("bf16") == 0.2e12


def test_a_kernel_takes_as_long_as_its_precision() -> None:
    constants = default_calibration(H200.device)
    slow, half, fast = (
        Kernel("mm", 1e13, 1, precision).seconds(H200, constants) for precision in ("fp32", "tf32", "bf16")
    )
    assert slow / fast == pytest.approx(989 / 66.9, rel=1e-3)
    assert half / fast == pytest.approx(2, rel=1e-3)


def precisions_of_a_step(dtype: torch.dtype) -> dict[str, str]:
    with FakeTensorMode(), MemoryMeter() as meter:
        x, image, weight = (torch.empty(shape, dtype=dtype) for shape in ((8, 8), (1, 3, 8, 8), (4, 3, 3, 3)))
        (x @ x + 1).relu()
        functional.conv2d(image, weight)
        functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3)
    return {kernel.operation: kernel.precision for _, kernel in meter.queue}


@pytest.mark.usefixtures("cublas_setting")
def test_convolutions_are_rounded_to_tf32_and_products_if_the_script_says_so() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    found = precisions_of_a_step(torch.float32)
    assert (found["mm"], found[attention], found["convolution"]) == ("fp32", "fp32", "tf32")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    found = precisions_of_a_step(torch.float32)
    assert (found["mm"], found[attention], found["convolution"]) == ("tf32", "tf32", "tf32")
    assert set(precisions_of_a_step(torch.bfloat16).values()) == {"bf16"}


@pytest.mark.parametrize("flash", [True, False])
def test_attention_has_the_precision_of_the_layout(flash: bool) -> None:
    model, device = preset("gpt2-medium"), H200.device
    constants = replace(default_calibration(device), kernel_s=1e-12)
    took = {
        precision: attention_seconds(model, Layout(precision=precision, flash=flash), device, constants)
        for precision in ("amp", "amp-fp8", "tf32", "fp32")
    }
    assert took["amp"] == took["amp-fp8"] < took["tf32"] < took["fp32"]
    if flash:
        assert took["fp32"] / took["amp"] == pytest.approx(989 / 66.9, rel=1e-3)


def test_only_measured_steps_narrow_what_was_never_published_in_fp32() -> None:
    """A calibration on a GPU measures products in 16 bits; one on a CPU measures them in fp32."""
    layout = Layout(microbatch=8, global_batch=8, precision="fp32")
    calibrated = replace(
        default_calibration(H200.device),
        device=H200.device.name,
        source="measured on NVIDIA H200",
        measured=("matrix", "attention", "memory"),
    )
    steps = replace(calibrated, measured=("scale",))
    model = preset("gpt2-medium")
    described, own = describe_machine(CPU_FACTS)
    cpu = Node.of(name="this", device=described["device"])
    widths = {}
    for name, node, constants in (
        ("published", H200, None),
        ("calibrated", H200, calibrated),
        ("measured", H200, steps),
        ("cpu", cpu, own),
    ):
        plan = estimate(model, layout, node, calibration=constants)
        found = plan.answers["time.part.matrix products"]
        widths[name] = found.high / found.low
        advised = {note.partition("; run: ")[2] for note in plan.notes if "in fp32 is known" in note}
        wide = name in ("published", "calibrated")
        assert advised == ({"headway plan measure FILE.py:FACTORY"} if wide else set())
    wide, narrow = 2.0 / 0.6, 1.08 / 0.93
    expected = {"published": wide, "calibrated": wide, "measured": narrow, "cpu": narrow}
    assert widths == pytest.approx(expected)


@pytest.mark.parametrize(("precision", "low"), [("bf16", 0.9), ("fp32", 0.6)])
def test_a_traced_step_of_products_in_fp32_may_be_faster_than_planned(precision: str, low: float) -> None:
    kernel = Kernel("mm", 1e13, 1, precision)
    found = TraceResult(parameters=1, allocated=1e9, reserved=1e9, kernel_counts={kernel: 1.0})
    step = make_estimate("mine", found, TraceSettings(factory="train:make"), H200, Calibration()).answers[
        "time.step"
    ]
    assert step.low / step.value == pytest.approx(low)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    dist.leave()


class UntilPlanned(hw.TrainValStage):
    """Trains until the plan of its step was traced."""

    def step(self, batch: Any) -> torch.Tensor:
        if self.pipe.directory.plan_file.exists():
            self.stop_stage()
        return self.models["net"](batch[0]).square().mean()


@pytest.mark.usefixtures("alone")
def test_a_step_is_traced_in_the_precision_of_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = H200, default_calibration(H200.device)
    monkeypatch.setattr("headway.train.diagnose.traced_plan.machine_here", lambda _: here)
    products = {}
    for precision in ("fp32", "tf32"):
        pipe = hw.Pipeline(name="traced", root=tmp_path / precision)
        pipe.register_model("net", torch.nn.Linear(512, 512))
        pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1))
        rows = torch.utils.data.TensorDataset(torch.randn(1024, 512))
        pipe.register_dataset("train", hw.data.DataLoader(rows, batch_size=1024))
        pipe.append_stage(UntilPlanned(log_every=1, precision=precision), max_epochs=10_000)
        pipe.enable_plan()
        plan = json.loads((pipe.run().path / "plan.json").read_text())
        products[precision] = plan["answers"]["time.products"]["value"]
    assert products["fp32"] > 2 * products["tf32"]
