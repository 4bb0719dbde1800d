"""How a `TrainValStage` trains: its settings, checked when they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from headway.errors import UsageError
from headway.train.model import precision

LOG_EVERY = 50


@final
@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a `TrainValStage` trains; given to it by name: `Classify(precision="bf16", gradient_clip=1.0)`."""

    precision: precision.Name = "fp32"
    """fp32, tf32, bf16 or fp16 (fp16 with a loss scale)"""
    accumulate: int = 1
    """batches per optimizer step; the gradient is that of the mean over all their samples, on all ranks"""
    gradient_clip: float | None = None
    """largest norm of all gradients together; the norm is logged as train/grad_norm"""
    val_every: int | str = 1
    """epochs between validations, or "500 steps"; 0 for none"""
    limit_train_batches: int | None = None
    """batches per epoch, for trying things out"""
    limit_val_batches: int | None = None
    log_every: int = LOG_EVERY
    """steps between log points, where ranks exchange metrics and agree on stopping"""
    on_nan: Literal["stop", "skip"] = "stop"
    """a loss that is not finite stops the run at the next log point; or each such step is left out, which costs a wait
    for the device in every step"""
    max_skips: int = 10
    """steps in a row that may be left out before the run stops all the same"""
    deterministic: bool = False
    """repeatable kernels, where torch has them; it raises where it does not"""

    def __post_init__(self) -> None:
        precision.check_name(self.precision)
        for name in ("accumulate", "log_every", "max_skips"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r}: give a whole number of at least 1")
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise UsageError(
                f"gradient_clip={self.gradient_clip!r}: give a norm above 0, or None for no clipping"
            )
        if self.on_nan not in ("stop", "skip"):
            raise UsageError(f'on_nan={self.on_nan!r} is unknown: use "stop" or "skip"')
        _ = self.val_steps

    @property
    def val_steps(self) -> int | None:
        """Steps between validations; None if they come with the epochs."""
        if isinstance(self.val_every, int):
            return None
        number, _, unit = self.val_every.partition(" ")
        if not number.isdecimal() or int(number) < 1 or unit not in ("step", "steps"):
            raise UsageError(f'val_every={self.val_every!r}: give a number of epochs, or such as "500 steps"')
        return int(number)
