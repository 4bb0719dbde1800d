"""Crops in FP8, with the numbers that go with them in the layout of Transformer Engine's delayed scaling.

The largest value of a normalized pixel is known, so the scale is fixed, and the history of largest values is constant.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
_HISTORY = 1024  # Transformer Engine's default length


class Fp8Scaling(NamedTuple):
    """How FP8 values relate to real ones: `value = crop.to(torch.float32) * scale_inv`."""

    scale: Tensor
    """1 value, float32"""
    scale_inv: Tensor
    amax_history: Tensor
    """1024 x 1; the first row is the latest"""

    @classmethod
    def of(cls, largest: float, device: torch.device | str = "cpu") -> Fp8Scaling:
        """Returns the scaling of values that are at most `largest`, or minus that."""
        scale = torch.full((1,), E4M3_MAX / largest, device=device)
        return cls(scale, 1 / scale, torch.full((_HISTORY, 1), largest, device=device))

    def dequantize(self, crops: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Returns crops as numbers that any operation takes.

        >>> batch.fp8.dequantize(batch.global_crops)
        """
        return (crops.to(torch.float32) * self.scale_inv.to(crops.device)).to(dtype)
