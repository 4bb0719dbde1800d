"""Devices and nodes: a catalog (`catalog.yaml`), and the user's own, described by the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files

from headway.errors import UsageError, unknown_name
from headway.plan import checks
from headway.plan.yaml_reader import parse_yaml

GIB = 1 << 30
FP8 = ("fp8", "amp-fp8")
"""Precisions whose matrix products are in 8 bits."""
FP32 = ("fp32", "tf32")
"""Precisions whose matrix products have inputs in 32 bits."""
CONTEXT_BYTES = 767 * 2**20
"""Memory of a CUDA context, measured on an H200."""
USABLE_SHARE = 0.985
"""GiB that a process can allocate over the nominal figure: 79.3 of an A100's 80, 139.8 of an H200's 141."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Names carry their units; peaks are dense TFLOP/s.

    node = hw.plan.Node("h200-sxm8")
    print(node.device)                                      # memory, bandwidth and peaks of an H200
    """

    name: str
    memory_GB: float
    hbm_GBps: float
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp32: float | None = None
    """Without TF32, by vector units (AMD: matrix units). None: not known; products take as long as in TF32."""
    nvlink_GBps: float | None = None
    """One direction, all links together; None if peers communicate over PCIe."""
    peers: float | None = None
    """Number of GPUs to each of which it has a direct link; None: a switch gives all links to any pair."""
    pcie_GBps: float = 31
    watts: float = 400
    achievable: float = 0.8
    """Fraction of the peak that the best real matrix product reaches."""
    fp8_achievable: float = 0.7
    power_limited: float = 1.0
    """Fraction of that rate that remains under a lower power limit, which slows only power-hungry kernels."""
    hbm_achievable: float = 0.88
    exponentials_T: float | None = None
    """10^12 exponentials per second: fused attention computes one per score, in addition to its products. None: not
    known; the constants of attention then include them."""
    usable_GiB: float | None = None
    source: str = "given by the user"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "source") or value is None:
                continue
            share = {"at_most": 1.0} if field.name.endswith(("achievable", "limited")) else {}
            checks.require_number(f"device.{field.name}", value, **share)
        if self.bf16 is None and self.fp16 is None:
            raise UsageError(f"device {self.name} has no peak rate; give bf16 or fp16 in TFLOP/s")

    @property
    def memory_bytes(self) -> float:
        """Bytes that a process can allocate, as the driver reports them; where unknown, most of the nominal size.

        Vendors write GB and count GiB: an MI300X with "192 GB" reports 192 GiB.
        """
        return (self.usable_GiB or USABLE_SHARE * self.memory_GB) * GIB

    @property
    def is_cpu(self) -> bool:
        """Whether it is a calibrated CPU, whose products were measured in fp32."""
        return self.name == "cpu"

    @property
    def context_bytes(self) -> float:
        """Bytes that the driver takes for the CUDA context of a process. A calibrated CPU has none."""
        return 0.0 if self.is_cpu else CONTEXT_BYTES

    @property
    def context_text(self) -> str:
        """The context as a term of a formula."""
        return f" + {self.context_bytes / 2**20:.0f} MiB (CUDA context)" if self.context_bytes else ""

    @property
    def peak_flops(self) -> float:
        """Dense 16-bit FLOP/s: the denominator of every MFU."""
        return (self.bf16 or self.fp16 or 0.0) * 1e12

    def check_precision(self, precision: str) -> None:
        """Refuses products in 8 bits on a device without units for them."""
        if precision in FP8 and not self.fp8:
            raise UsageError(
                f"layout.precision is {precision}, but {self.name} has no peak rate in fp8; use bf16 or amp, or give "
                "device.fp8 in TFLOP/s"
            )

    def precision_peak(self, precision: str) -> float:
        """Dense FLOP/s of the data sheet in the precision of the matrix products."""
        return self.fp8 * 1e12 if precision in FP8 and self.fp8 else self.peak_flops

    def matrix_flops(self, precision: str) -> float:
        """FLOP/s that a large matrix product reaches."""
        if precision in FP8 and self.fp8:
            return self.fp8 * 1e12 * self.fp8_achievable * self.power_limited
        peak = self.peak_flops
        if precision in FP32 and not self.is_cpu:
            # TF32 runs at half the 16-bit rate; a V100, without bf16, has no units for it
            rounds = precision == "tf32" and self.bf16 is not None
            peak = self.fp32 * 1e12 if self.fp32 and not rounds else peak / 2
        return peak * self.achievable * self.power_limited

    @property
    def attention_flops(self) -> float:
        """FLOP/s to which the constants of fused attention are relative; the power limit does not slow it."""
        return self.peak_flops * self.achievable

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes that a copy in device memory reads and writes in a second."""
        return self.hbm_GBps * 1e9 * self.hbm_achievable

    @property
    def peer_bytes_per_s(self) -> float:
        """Bandwidth to the other devices of the node together, one direction."""
        return (self.nvlink_GBps or self.pcie_GBps) * 1e9

    def reached_bytes_per_s(self, others: int) -> float:
        """Bandwidth to this many other devices of the node: without a switch, each has a direct link.

        >>> find_device("mi300x-192").reached_bytes_per_s(1) / 1e9
        64.0
        """
        share = 1.0 if self.peers is None else min(1.0, others / self.peers)
        return self.peer_bytes_per_s * share


class Node:
    """A machine with accelerators, by its name in the catalog or by its own numbers.

    >>> Node("h200-sxm8").gpus
    8
    >>> Node.of(name="mine", device={"name": "x", "memory_GB": 48, "hbm_GBps": 900, "bf16": 180}, gpus=4).gpus
    4
    """

    name: str
    device: Device
    gpus: int
    inter_bytes_per_s: float
    price_per_hour: float | None
    source: str

    def __init__(self, name: str, *, price_per_hour: float | None = None) -> None:
        table = _catalog()["nodes"]
        if name not in table:
            raise UsageError(
                f"{unknown_name('node', name, table)}; or describe your own: "
                "node: {device: ..., gpus: ..., inter_Gbps: ...} in YAML, or hw.plan.Node.of(device=..., gpus=...)"
            )
        self._set(name, dict(table[name]), price_per_hour)

    @classmethod
    def of(cls, /, *, name: str = "mine", price_per_hour: float | None = None, **keys: object) -> Node:
        """Creates a node that is not in the catalog; `device` is a name or a mapping of device keys."""
        node = cls.__new__(cls)
        node._set(name, keys, price_per_hour)
        return node

    def _set(self, name: str, keys: Mapping[str, object], price: float | None) -> None:
        checks.require_known_keys("node", keys, ("device", "gpus", "inter_Gbps", "source"))
        if "device" not in keys:
            raise UsageError(f"node has no device; give one of {checks.listed(_catalog()['devices'])}")
        self.name = name
        self.device = find_device(keys["device"])
        self.gpus = checks.require_int("node.gpus", keys.get("gpus", 1))
        self.inter_bytes_per_s = (
            checks.require_number("node.inter_Gbps", keys.get("inter_Gbps", 10)) * 1e9 / 8
        )
        self.price_per_hour = None if price is None else checks.require_number("node.price_per_hour", price)
        self.source = str(keys.get("source", "given by the user"))

    def __repr__(self) -> str:
        return f"Node({self.name!r}: {self.describe()})"

    def with_price(self, price_per_hour: object) -> Node:
        """Returns the same node at another price."""
        node = copy(self)
        node.price_per_hour = checks.require_number("node.price_per_hour", price_per_hour)
        return node

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON; `Node.of` takes them."""
        return {
            "name": self.name,
            "device": asdict(self.device),
            "gpus": self.gpus,
            "inter_Gbps": self.inter_bytes_per_s * 8e-9,
        }

    def count_for(self, gpus: int) -> int:
        """Returns the number of nodes that have this many GPUs."""
        return -(-gpus // self.gpus)

    def describe(self) -> str:
        """Returns the GPUs and the network bandwidth as one line.

        >>> Node("dgx-h100").describe()
        '8 x h100-sxm-80, 3200 Gb/s'
        """
        return f"{self.gpus} x {self.device.name}, {self.inter_bytes_per_s * 8e-9:g} Gb/s"


def node_names() -> list[str]:
    """Returns the names of all nodes in the catalog."""
    return list(_catalog()["nodes"])


def find_device(given: object) -> Device:
    """Returns a device by its name in the catalog, or from a mapping of its keys."""
    table = _catalog()["devices"]
    if isinstance(given, str):
        checks.require_choice("node.device", given, tuple(table))
        return Device(name=given, **table[given])  # type: ignore[arg-type]
    keys = checks.require_mapping("node.device", given)
    valid = [field.name for field in fields(Device)]
    checks.require_known_keys("node.device", keys, valid)
    for needed in ("memory_GB", "hbm_GBps"):
        if needed not in keys:
            raise UsageError(
                f"node.device has no {needed}; a device needs memory_GB, hbm_GBps and bf16 or fp16"
            )
    # YAML reads 4090 as a number and 2026-11-15 as a date
    texts = {key: str(keys[key]) for key in ("name", "source") if key in keys}
    return Device(**{"name": "device", **keys, **texts})  # type: ignore[arg-type]


@cache
def _catalog() -> dict[str, dict[str, dict[str, object]]]:
    loaded = parse_yaml(files("headway.plan.machine").joinpath("catalog.yaml").read_text(), "catalog.yaml")
    return loaded  # type: ignore[return-value]
