"""Settings of a trace or a measurement: the user's functions by name, and how the step runs.

The process that traces and the process that measures read the same settings, as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from headway.errors import UsageError
from headway.plan import checks

_PRECISIONS = ("amp", "fp32", "pure-bf16")
_BUILT_IN = {
    "inputs": (),
    "loss": ("cross_entropy", "mse"),
    "optimizer": ("adamw", "adamw-fused", "adamw-foreach", "adam", "sgd", "sgd-momentum"),
}
"""Names that do not refer to functions of the user."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """One training step to trace. Functions are named `FILE.py:name`; a name alone is in the factory's file.

    settings = hw.plan.TraceSettings(factory="train.py:make_model", batch_size=8, loss="cross_entropy")
    """

    factory: str
    """Returns the module, or (module, batch), or (module, (inputs, target), loss)."""
    inputs: str | None = None
    """Returns the batch; called with the batch size if it takes one. Default: `batch`, in the factory's file."""
    loss: str | None = None
    """cross_entropy, mse, or a function of (output, target). Without it the module returns its loss."""
    optimizer: str = "adamw"
    """adamw (on GPUs adamw-foreach), adamw-fused, adam, sgd, sgd-momentum, or a function of the parameters."""
    precision: str = "amp"
    """amp (autocast to bf16), fp32, or pure-bf16."""
    batch_size: int | None = None
    """Samples per batch, for an `inputs` function that takes the batch size."""
    accumulate: int = 1
    """Microbatches per step."""
    arguments: dict[str, int] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    fsdp: int = 1
    """Ranks that shard the model (FSDP2; each repeated block is a unit)."""
    checkpoint: bool = False
    """Recompute each repeated block in the backward pass."""

    def __post_init__(self) -> None:
        checks.require_choice("precision", self.precision, _PRECISIONS)
        for key in ("accumulate", "fsdp"):
            checks.require_int(key, getattr(self, key))
        if self.batch_size is not None:
            checks.require_int("batch_size", self.batch_size)
        place, _, name = self.factory.rpartition(":")
        if not place or not name:
            raise UsageError(f"{self.factory!r} does not name a function; expected FILE.py:function")
        if place.endswith(".py") and not Path(place).is_file():
            raise UsageError(f"there is no file {place} in {Path.cwd()}; expected FILE.py:function")

    def to_dict(self) -> dict[str, object]:
        """Returns JSON values in which every function is named with its file."""
        place = self.factory.rpartition(":")[0]
        values = asdict(self)
        for key, names in _BUILT_IN.items():
            value = values[key]
            if value is not None and ":" not in value and value not in names:
                values[key] = f"{place}:{value}"
        return values
