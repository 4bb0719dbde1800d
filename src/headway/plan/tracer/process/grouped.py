"""Grouped matrix products, as models with experts use them, in the precisions that CUDA supports.

torch's rule for tensors without data accepts bf16 only; the kernels on devices also accept fp32 and fp16. Autocast has
no rule for them: under amp, experts with fp32 weights are multiplied in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def install() -> torch.library.Library:
    """Replaces the rule and adds the count of FLOPs. The caller must keep the result alive."""
    rules = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    rules.impl("_grouped_mm", _shape, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
    register_flop_formula(torch.ops.aten._grouped_mm, get_raw=True)(_flops)
    return rules


def _shape(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - torch's own signature
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Two matrices are split along the summed dimension: one product per group. Otherwise groups are ranges of rows."""
    groups = [] if offs is None else [len(offs)]
    if left.dim() == right.dim() == 2:
        shape = [*groups, left.shape[0], right.shape[1]]
    elif left.dim() == right.dim():
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> float:
    """A group multiplies its own rows only: the sum is the same as without groups."""
    if left.dim() == right.dim() == 3:
        return 2.0 * math.prod(left.shape) * right.shape[2]
    return 2.0 * math.prod(left.shape[-2:]) * right.shape[-1]
