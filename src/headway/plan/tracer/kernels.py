"""The kernels of a traced step, and how long each takes on a device and on the host that launches it."""

from __future__ import annotations

from typing import NamedTuple

from headway.plan.cost.compute import stream_bytes_per_s
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node

_KERNEL_GAP_S = 2e-6
"""Time for a kernel to start and drain, however little work it has."""


class Kernel(NamedTuple):
    """One kernel by its roofline: floating-point operations, and bytes read and written."""

    operation: str
    flops: float
    bytes: int
    precision: str = "bf16"
    """Precision of a product: bf16 (any 16 bits), fp32, or tf32."""

    def seconds(self, node: Node, constants: Calibration) -> float:
        """Time on the device: the slower of arithmetic and memory traffic."""
        flops = self.flops / 2 if self.operation.endswith("(causal)") else self.flops
        rate = node.device.matrix_flops(self.precision) * constants.matrix
        return max(flops / rate, self.bytes / stream_bytes_per_s(node.device, constants)) + _KERNEL_GAP_S


def launch_seconds(phase: str, constants: Calibration) -> float:
    """Time that the host takes to launch one kernel in this phase of the step."""
    factors = {
        "forward": constants.host_forward,
        "backward": constants.host_backward,
        "optimizer": constants.host_optimizer,
    }
    return constants.kernel_s * factors.get(phase, 1.0)
