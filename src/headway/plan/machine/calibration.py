"""The constants that no data sheet lists: the fraction of its peak that a real kernel or link reaches.

The defaults were fitted on ten of vTrain's 109 measured A100 steps (docs/plan.md has the error on the other 99); the
constants of other families are in `efficiency`. `headway plan calibrate` measures the constants of this machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.yaml_reader import read_yaml


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration constants. Fractions are relative to what the device can achieve; times are in seconds.

    slow = hw.plan.Calibration(matrix=0.6, network=0.5)     # headway plan calibrate measures those of a machine
    plan = hw.plan.estimate(model, layout, node, calibration=slow)
    """

    matrix: float = 0.93
    """Fraction of the best matrix product's rate that the products of a model reach."""
    matrix_fp8: float = 0.93
    """The same for products in fp8, relative to the best product in fp8."""
    experts: float = 0.93
    """The same for the grouped products of experts, whose tokens are uneven."""
    serial: float = 0.5
    """Of a product's arithmetic and memory traffic, the fraction of the shorter that does not overlap the longer."""
    attention: float = 0.62
    """Fraction of the best matrix product's rate that fused attention reaches, forward, in torch."""
    fused_attention: float = 0.7
    """The same in Megatron (cuDNN's kernels)."""
    attention_backward: float = 2.5
    """Time of fused attention's backward pass relative to its forward pass: five products instead of two."""
    memory: float = 0.871
    """Fraction of the copy bandwidth that elementwise kernels reach."""
    kernel_s: float = 9e-6
    """Overhead per kernel: launch, ramp-up, tail."""
    peer: float = 0.78
    """Fraction of the one-direction peer link that collectives inside a node reach."""
    peer_latency_s: float = 5.4e-6
    """Latency per step of a ring inside a node."""
    network: float = 0.934
    """Fraction of the node's network bandwidth that collectives between nodes reach."""
    network_latency_s: float = 4.8e-6
    """Latency per step of a ring between nodes."""
    jitter: float = 0.01
    """Standard deviation of a rank's step over its mean: all wait for the slowest. Assumed; fits give 0.01 to 0.014."""
    scale: float = 1.0
    """Measured time of the device relative to the predicted time, once a module has been measured."""
    host_forward: float = 1.0
    """Host time per kernel in the forward pass, in units of kernel_s."""
    host_backward: float = 1.0
    """Host time per kernel in the backward pass, in units of kernel_s."""
    host_optimizer: float = 1.0
    """Host time per kernel in the optimizer, whose kernels take lists of tensors."""
    source: str = "fitted on ten vTrain runs (A100, 2023)"
    device: str | None = None
    """The device that was measured; the constants are not used for another. None: they apply to any device."""
    measured: tuple[str, ...] = ()
    """The constants that were measured on `device`; the others are the defaults of its family."""

    def __post_init__(self) -> None:
        if not isinstance(self.measured, list | tuple):
            raise UsageError(
                f"calibration.measured is {checks.shown(self.measured)}; expected a list of constants"
            )
        if not isinstance(self.source, str):
            raise UsageError(f"calibration.source is {checks.shown(self.source)}; expected text")
        object.__setattr__(self, "measured", tuple(self.measured))
        for name in self.measured:
            checks.require_choice("calibration.measured", name, _NUMBERS)
        for name in _NUMBERS:
            least = -1e-9 if name in ("serial", "jitter") else 0.0
            checks.require_number(f"calibration.{name}", getattr(self, name), above=least)


_NUMBERS = tuple(field.name for field in fields(Calibration) if field.type == "float")


def calibration_file() -> Path:
    """The file that `headway plan calibrate` writes by default."""
    return Path.home() / ".headway" / "machine.yaml"


def load_calibration(path: str | Path) -> Calibration:
    """Reads a calibration that `save_calibration` wrote."""
    content = read_yaml(path, what="a calibration file")
    data = dict(checks.require_mapping("calibration", content.get("calibration", {})))
    checks.require_known_keys(f"{path}: calibration", data, (*_NUMBERS, "source", "device", "measured"))
    try:
        return Calibration(**data)  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def save_calibration(
    path: str | Path,
    calibration: Calibration,
    *,
    node: dict[str, object] | None = None,
    facts: dict[str, object],
) -> None:
    """Writes the constants and the measurements behind them as YAML."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    constants = {**asdict(calibration), "measured": list(calibration.measured)}
    content = {"node": node, "calibration": constants, "measured": facts}
    text = yaml.safe_dump(content, sort_keys=False)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    partial.replace(file)
