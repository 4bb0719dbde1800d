"""The constants that no data sheet gives: which fraction of its peak a real kernel or link reaches.

Eight constants describe a machine, and four more one model on it. The defaults were fitted on ten of vTrain's 109
measured A100 steps (docs/plan.md has the error on the other 99); `headway plan calibrate` measures this machine's own.
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
    """Calibration constants. Fractions are relative to what the device can achieve; times are in seconds."""

    matrix: float = 0.853
    """Fraction of the best matrix product's rate that the products of a model reach."""
    attention: float = 0.81
    """Fraction of the best matrix product's rate that attention reaches."""
    memory: float = 0.835
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
    scale: float = 1.0
    """Measured over predicted time of the device, once a module has been measured."""
    host_forward: float = 1.0
    """Host time per kernel in the forward pass, in units of kernel_s."""
    host_backward: float = 1.0
    """Host time per kernel in the backward pass, in units of kernel_s."""
    host_optimizer: float = 1.0
    """Host time per kernel in the optimizer, whose kernels take lists of tensors."""
    source: str = "fitted on ten vTrain runs (A100, 2023)"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            checks.require_number(f"calibration.{name}", getattr(self, name))


_NUMBERS = tuple(field.name for field in fields(Calibration) if field.name != "source")


def calibration_file() -> Path:
    """The file that `headway plan calibrate` writes by default."""
    return Path.home() / ".headway" / "machine.yaml"


def load_calibration(path: str | Path) -> Calibration:
    """Reads a calibration that `save_calibration` wrote."""
    data = checks.require_mapping("calibration", read_yaml(path).get("calibration", {}))
    checks.require_known_keys(f"{path}: calibration", data, (*_NUMBERS, "source"))
    for name, value in data.items():
        if name != "source" and not isinstance(value, int | float):
            raise UsageError(f"{path}: calibration.{name} is {value!r}; expected a number")
    return Calibration(**data)  # type: ignore[arg-type]


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
    content = {"node": node, "calibration": asdict(calibration), "measured": facts}
    text = yaml.safe_dump(content, sort_keys=False)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    partial.replace(file)
