"""Makes a CPU trace use memory as CUDA would.

Tensors in a trace have no data; only the tensors that operations save matter. Where CPU kernels save other tensors than
CUDA kernels (dropout, RMS norm, attention with dropout, recurrent layers), or autocast chooses other precisions, CUDA's
behavior replaces the CPU's. All of this happens in the tracing process only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils._pytree import tree_map

from headway.plan.tracer.process import grouped, recurrent

# operations that autocast runs in fp32 on CUDA, but not on the CPU
_CUDA_FP32 = (
    "layer_norm", "group_norm", "exp", "expm1", "log", "log10", "log2", "log1p",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "reciprocal", "rsqrt", "softplus", "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity",
    "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "binary_cross_entropy_with_logits",
    "logsumexp", "nll_loss_nd",
)  # fmt: skip
# operations that return fp32 under CUDA's autocast unless the caller gives a dtype; cross_entropy keeps its input's
_CUDA_FP32_RESULT = (
    "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod",
)  # fmt: skip


def install() -> list[torch.library.Library]:
    """Replaces the CPU's behavior. The caller must keep the result alive."""
    _skip_initialization()
    nn.Module._apply = _apply  # type: ignore[method-assign]
    functional.dropout = _dropout
    functional.rms_norm = _rms_norm
    functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)
    recurrent.install()
    return [_autocast_as_cuda(), grouped.install()]


def _skip_initialization() -> None:
    """Turns initializers off: values do not matter here, and some initializers read them."""
    for name in dir(torch.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Replaces the method behind `.to()` and `.bfloat16()`, which refuses tensors without data."""
    if recurse:
        for child in self.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter.data)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


def _autocast_as_cuda() -> torch.library.Library:
    rules = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    for name in (*_CUDA_FP32, *_CUDA_FP32_RESULT):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            continue  # the CPU has the same rule
        rule = _to_fp32 if name in _CUDA_FP32_RESULT else _in_fp32
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        rules.impl(name, rule(operation, keys), "AutocastCPU")  # type: ignore[no-untyped-call]
    # the CPU's rule casts the inputs; CUDA has no rule, and the decomposed operations follow their own
    cross_entropy = torch.ops.aten.cross_entropy_loss.default
    rules.impl("cross_entropy_loss", cross_entropy.decompose, "AutocastCPU", allow_override=True)  # type: ignore[no-untyped-call]
    return rules


def _is_16_bit(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_fp32(operation: Callable[..., Any], keys: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            given = [kwargs.get("dtype"), *args[1:]]
            if _is_16_bit(args[0]) and not any(isinstance(value, torch.dtype) for value in given):
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def _in_fp32(operation: Callable[..., Any], keys: Any) -> Callable[..., Any]:
    def widen(value: Any) -> Any:
        return value.float() if _is_16_bit(value) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map(widen, args), **tree_map(widen, kwargs))

    return run


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA saves a mask of one byte per element; the CPU saves a scaled copy."""
    if not training or p == 0:
        return input
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped


class _RmsNorm(torch.autograd.Function):
    """CUDA's fused kernel saves its input and one number per row; the CPU's saves every intermediate in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        rows = torch.empty(x.shape[: x.dim() - dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _rows = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001 - torch's own signature
) -> torch.Tensor:
    out: torch.Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


def _attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        """CUDA's fused kernels apply dropout on the fly; the CPU falls back to the full score matrix."""
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return original(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})

    return scaled_dot_product_attention
