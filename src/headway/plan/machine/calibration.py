"""The constants that no data sheet gives: how near real kernels and links come to their peaks.

Eight numbers, and four that one measured model sets. The defaults were fitted on ten of vTrain's 109 measured A100
steps (docs/plan.md has the error on the other 99); `headway plan calibrate` replaces them by what this machine does.
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
    """Fractions are of the device's achievable figure; times are seconds."""

    matrix: float = 0.853
    """Of the best matrix product, for the products a model really has."""
    attention: float = 0.81
    """Of the best matrix product, for attention scores."""
    memory: float = 0.835
    """Of the copy bandwidth, for elementwise kernels."""
    kernel_s: float = 9e-6
    """Lost per kernel: launch, ramp up, tail."""
    peer: float = 0.78
    """Of the one-direction peer link, for collectives inside a node."""
    peer_latency_s: float = 5.4e-6
    """Per step of a ring inside a node."""
    network: float = 0.934
    """Of the node's network."""
    network_latency_s: float = 4.8e-6
    """Per step of a ring between nodes."""
    scale: float = 1.0
    """Of the device's own time, measured over predicted, once a run has been measured."""
    host_forward: float = 1.0
    """Host time per kernel in the forward pass, in units of kernel_s."""
    host_backward: float = 1.0
    """In the backward pass."""
    host_optimizer: float = 1.0
    """In the optimizer, whose kernels take lists of tensors."""
    source: str = "fitted on ten vTrain runs (A100, 2023)"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            checks.require_number(f"calibration.{name}", getattr(self, name))


_NUMBERS = tuple(field.name for field in fields(Calibration) if field.name != "source")


def calibration_file() -> Path:
    """Where `headway plan calibrate` keeps what it measured."""
    return Path.home() / ".headway" / "machine.yaml"


def load_calibration(path: str | Path) -> Calibration:
    """A calibration as `save` wrote it."""
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
    """Writes the constants and what they were measured from, readable by people."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"node": node, "calibration": asdict(calibration), "measured": facts}
    text = yaml.safe_dump(content, sort_keys=False)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    partial.replace(file)
