"""Recurrent layers as cuDNN runs them: one kernel for all time steps and layers, one reserve for the backward pass.

The CPU's kernels save other tensors, layer by layer, and torch does not know the size of cuDNN's reserve. The sizes
here follow from what cuDNN reported (pytorch issue 2895: 736,000,000 bytes for an LSTM of 4 layers, 864,000,000 for
such a GRU); measurements of three layers on an H200 agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_SAVED_PER_CELL = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
"""Numbers saved per cell, time step and layer: gates, states, and the output of every layer but the last."""


def install() -> None:
    """Replaces torch's recurrent layers."""
    for kind in _SAVED_PER_CELL:
        setattr(torch._VF, kind, _as_cudnn(kind, getattr(torch._VF, kind)))


@torch.library.custom_op("headway::rnn", mutates_args=())
def _rnn(input: torch.Tensor, weights: Sequence[torch.Tensor], width: int, kept: int) -> list[torch.Tensor]:
    raise NotImplementedError("only the fake implementation exists")


@_rnn.register_fake
def _(input: torch.Tensor, weights: Sequence[torch.Tensor], width: int, kept: int) -> list[torch.Tensor]:  # noqa: ARG001
    tokens = input.shape[:-1]
    return [input.new_empty((*tokens, width)), input.new_empty((*tokens, kept))]


@torch.library.custom_op("headway::rnn_backward", mutates_args=())
def _rnn_backward(
    grad: torch.Tensor, input: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    raise NotImplementedError("only the fake implementation exists")


@_rnn_backward.register_fake
def _(grad: torch.Tensor, input: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG001
    return [torch.empty_like(input), *(torch.empty_like(weight) for weight in weights)]


@register_flop_formula(torch.ops.headway.rnn, get_raw=True)
def _flops(input: torch.Tensor, weights: Sequence[torch.Tensor], *_: Any, **__: Any) -> float:
    """Each time step multiplies by each matrix."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2.0 * (input.numel() // input.shape[-1]) * matrices


@register_flop_formula(torch.ops.headway.rnn_backward, get_raw=True)
def _flops_backward(
    _grad: torch.Tensor, input: torch.Tensor, weights: Sequence[torch.Tensor], **_: Any
) -> float:
    return 2 * _flops(input, weights)


class _Layers(torch.autograd.Function):
    """Saves its input, its output and cuDNN's reserve. `tensors` are the initial states, then the weights."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, width: int, kept: int, states: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        used = [
            tensor.to(input.dtype) for tensor in tensors
        ]  # under autocast these are copies, and all are saved
        output, reserve = torch.ops.headway.rnn(input, used[states:], width, kept)
        ctx.save_for_backward(input, output, reserve, *used)
        ctx.states, ctx.dtypes = states, [tensor.dtype for tensor in tensors]
        return output, *(torch.empty_like(state) for state in used[:states])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, _output, _reserve, *used = ctx.saved_tensors
        made, *each = torch.ops.headway.rnn_backward(grads[0], input, used[ctx.states :])
        each = [*(torch.empty_like(state) for state in used[: ctx.states]), *each]
        return made, None, None, None, *(g.to(dtype) for g, dtype in zip(each, ctx.dtypes, strict=True))


def _as_cudnn(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: torch.Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
        if not isinstance(weights, list):  # a packed sequence: its sizes depend on the data
            return original(input, hx, weights, *rest)
        _bias, layers, _dropout, training, bidirectional, batch_first = rest
        if not training:
            return original(input, hx, weights, *rest)
        states = hx if isinstance(hx, tuple) else (hx,)
        directions = 2 if bidirectional else 1
        width, cells = states[0].shape[-1] * directions, states[-1].shape[-1] * directions
        if torch.is_autocast_enabled("cpu"):
            input = input.to(torch.get_autocast_dtype("cpu"))
        steps = input.transpose(0, 1) if batch_first else input
        kept = cells * (_SAVED_PER_CELL[kind] * layers - 1)
        output, *last = _Layers.apply(steps, width, kept, len(states), *states, *weights)  # type: ignore[no-untyped-call]
        return output.transpose(0, 1) if batch_first else output, *last

    return run
