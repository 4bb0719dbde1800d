"""The backward pass of traces in forked processes computes what autograd's engine computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.plan.tracer.process.backward import run_backward


class Doubled(torch.autograd.Function):
    """Two outputs, of which one may stay unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return 2 * x, x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] + 2 * x * gradients[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.second, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recomputed = 0

    def block(self, x: Tensor) -> Tensor:
        self.recomputed += 1
        return self.second(torch.relu(self.first(x))) + self.first(x)


def logits_loss(net: Net, tokens: Tensor) -> Tensor:
    x = net.norm(net.table(tokens))
    x = x + net.attention(x, x, x, need_weights=False)[0]
    x = checkpoint(net.block, x, use_reentrant=False)
    kept, _ = Doubled.apply(x)
    left, right = (kept + net.second.bias).chunk(2, dim=-1)
    logits = torch.cat([left * right, right], dim=-1) @ net.table.weight.T  # a tied weight
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_gradients_are_those_of_the_engine() -> None:
    torch.manual_seed(0)
    net, tokens = Net(), torch.randint(11, (3, 5))
    for _ in range(2):  # gradients accumulate
        logits_loss(net, tokens).backward()
    expected = {name: weight.grad for name, weight in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    net.recomputed, seen = 0, []
    net.norm.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    for _ in range(2):
        run_backward(logits_loss(net, tokens))
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], msg=name)
    assert net.recomputed == 4  # once forward and once backward, in each pass
    assert len(seen) == 2 and torch.equal(seen[1], net.norm.weight.grad)


def test_what_a_node_has_saved_is_freed_as_it_runs() -> None:
    """Of a chain of squares, each of which saves its input, one is left after the other."""
    alive: list[int] = []
    x = torch.ones(4, requires_grad=True)
    saved: set[int] = set()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark = Mark()
            return x * x

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            alive.append(len(saved))
            return gradient

    class Mark:
        def __init__(self) -> None:
            saved.add(id(self))

        def __del__(self) -> None:
            saved.discard(id(self))

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = Square.apply(y)
        return y.sum()

    run_backward(chain())
    assert alive == [4, 3, 2, 1] and not saved
