"""The constants of each GPU family, their sources, and the error interval of each kind of work.

A constant is measured, or fitted on published steps: `benchmarks/plan.py` prints the fit, and its errors on held-out
rows and sources. An interval is wide where no published step of a family contains the kind of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import FP8, FP32, Device

_AMPERE = Calibration()
_HOPPER = replace(
    _AMPERE,
    matrix=0.794,  # fitted, one constant for products in 16 bits and those of experts
    matrix_fp8=0.919,  # fitted
    experts=0.794,
    serial=0.5,  # eight products on one H200
    attention=0.467,  # 363 TFLOP/s on one H200, causal; FlashAttention-2 reaches 370 on an H100
    fused_attention=0.755,  # cuDNN: 600 TFLOP/s on an H100 (FlashAttention-3, figure 5, heads of 128, 8k)
    attention_backward=2.9,  # 370 and 318, 600 and 518 TFLOP/s (the same paper, figures 5 and 6)
    source="fitted on 24 published H100 and H200 steps",
)
_BLACKWELL = replace(
    _HOPPER,
    matrix=0.863,  # fitted, one constant for all products
    matrix_fp8=0.863,
    experts=0.863,
    attention=0.62,  # torch's kernels over cuDNN's, as on Hopper
    fused_attention=1.0,  # the exponentials are counted in addition to the products: `Device.exponentials_T`
    source="fitted on 14 published B200, B300, GB200 and GB300 steps",
)
_CONSTANTS = {"ampere": _AMPERE, "hopper": _HOPPER, "blackwell": _BLACKWELL}
_FAMILIES = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "h800": "hopper", "b200": "blackwell",
             "gb200": "blackwell", "b300": "blackwell", "gb300": "blackwell"}  # fmt: skip

_CALIBRATE = "headway plan calibrate"
_MEASURE = "headway plan measure FILE.py:FACTORY"


class TimeInterval(NamedTuple):
    """Bounds of a time relative to its estimate, and their source."""

    low: float
    high: float
    source: str
    remedy: str = _CALIBRATE
    """the command that narrows it"""

    @property
    def measured(self) -> bool:
        return self.source.startswith("measured")


MEASURED = (0.93, 1.08)
"""Five models on one H200: calibrated with one batch size, the others took 0.96 to 1.08 times as long as planned."""
_KNOWN = {
    "ampere": {"products": (0.95, 1.1), "experts": (0.6, 2.2), "attention": (0.9, 1.2), "memory": (0.8, 1.3),
               "peer": (0.9, 1.2), "network": (0.85, 1.25), "jitter": (0.5, 2.0)},
    "hopper": {"products": (0.915, 1.11), "experts": (0.82, 1.3), "attention": (0.86, 1.17), "memory": (0.8, 1.3),
               "peer": (0.8, 1.25), "network": (0.75, 1.4), "jitter": (0.5, 2.0)},
    "blackwell": {"products": (0.93, 1.09), "experts": (0.8, 1.4), "attention": (0.86, 1.17), "memory": (0.8, 1.3),
                  "peer": (0.8, 1.25), "network": (0.75, 1.4), "jitter": (0.5, 2.0)},
}  # fmt: skip
"""By family and kind of work: about nine of ten published steps are within the sum of these, also in sources that were
held out of the fit (`benchmarks/plan.py`). No step with experts is known on Ampere."""
_UNKNOWN = (0.6, 2.0)
"""For families without a published step, whose constants are Ampere's, and for products in fp32 and TF32."""
_CLASSES = {"matrix": "products", "attention": "attention", "memory": "memory", "peer": "peer",
            "network": "network", "experts": "experts", "jitter": "jitter"}  # fmt: skip


def device_family(device: Device) -> str | None:
    """Returns the family of a device of the catalog; None if no published step of its family is known."""
    return _FAMILIES.get(device.name.split("-")[0])


def default_calibration(device: Device) -> Calibration:
    """Returns the constants of the device's family; Ampere's for a device of unknown family.

    >>> from headway.plan.machine.hardware import find_device
    >>> default_calibration(find_device("h200-sxm-141")).source
    'fitted on 24 published H100 and H200 steps'
    """
    return _CONSTANTS[device_family(device) or "ampere"]


def scoped_calibration(given: Calibration | None, device: Device) -> tuple[Calibration, list[str]]:
    """Returns the constants for a device, and notes for the report.

    Constants that were measured on another device are not used.
    """
    own = default_calibration(device)
    if given is None:
        return own, []
    if given.device is None:
        return given, []
    if given.device != device.name:
        return own, [
            f"the calibration of {given.device} is not used for {device.name}, whose constants are {own.source}"
        ]
    host = {name: getattr(given, name) for name in ("host_forward", "host_backward", "host_optimizer")}
    measured = {name: getattr(given, name) for name in given.measured}
    facts = {"source": given.source, "device": given.device, "measured": given.measured}
    return replace(own, **{**host, **measured, **facts}), []


def intervals(device: Device, constants: Calibration, precision: str) -> Mapping[str, TimeInterval]:
    """Returns the interval of each kind of work: from measurements, from its family, or the widest.

    A measured step (`scale`) narrows the work on one device, but not the links. Products in another precision than the
    16 bits that were calibrated or published are narrowed by measured steps alone.
    """
    family = device_family(device)
    given = constants.device is None and constants.source.startswith("measured")
    measured_steps = given or "scale" in constants.measured
    wide = precision in FP32 and not device.is_cpu
    others = ("products", "attention", "experts") if wide else ("products",) if precision in FP8 else ()
    found = {}
    for constant, kind in _CLASSES.items():
        on_device = kind in ("products", "attention", "memory", "experts")
        measured = constant in constants.measured or (measured_steps and on_device)
        other = kind in others and not measured_steps
        remedy = _MEASURE if other else _CALIBRATE
        if measured and not other:
            found[kind] = TimeInterval(*MEASURED, constants.source)
        elif family is None:
            found[kind] = TimeInterval(*_UNKNOWN, f"no published step on {device.name} is known", remedy)
        elif other and wide:
            found[kind] = TimeInterval(*_UNKNOWN, f"no published step in {precision} is known", remedy)
        else:
            found[kind] = TimeInterval(*_KNOWN[family][kind], _CONSTANTS[family].source, remedy)
    return found
