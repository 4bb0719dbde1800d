"""A backward pass that calls the nodes of autograd's graph one by one.

Autograd's own engine cannot run in a process that was forked after CUDA was initialized: it starts a thread for each
device. Tensors without data need no threads, only the same operations in the same order.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction

_NUMBERS = count(1)
"""Numbers of backward passes: a checkpointed block recomputes once per number."""


def run_backward(loss: torch.Tensor) -> None:
    """Computes the gradients of all leaves, and frees the saved tensors of each node as soon as it has run.

    The caller must not keep a reference to the loss, which would keep the graph alive.
    """
    node, ones = loss.grad_fn, torch.ones_like(loss)
    del loss
    waiting = _Graph(node)
    waiting.add(node, 0, ones)
    del node, ones
    number = next(_NUMBERS)
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", lambda: number):
        while (turn := waiting.pop()) is not None:
            _run(*turn, waiting)
            del turn


class _Graph:
    """Nodes with their gradients so far. A node is ready when all its users have run; the latest of these is next."""

    def __init__(self, root: Any) -> None:
        self._users: dict[Any, int] = {root: 0}
        self._gradients: dict[Any, list[Any]] = {}
        self._ready: list[tuple[int, int, Any]] = []
        found = [root]
        while found:
            for after, _ in found.pop().next_functions:
                if after is not None:
                    if after not in self._users:
                        self._users[after] = 0
                        found.append(after)
                    self._users[after] += 1

    def add(self, node: Any, number: int, gradient: torch.Tensor | None) -> None:
        """Adds a gradient of one of the node's outputs; the last one makes the node ready."""
        buffer = self._gradients.setdefault(node, [None] * len(node._input_metadata))
        if gradient is not None:
            meta = node._input_metadata[number]
            gradient = gradient.sum_to_size(meta.shape).to(meta.dtype)  # as the engine does for nodes
            buffer[number] = gradient if buffer[number] is None else buffer[number] + gradient
        self._users[node] -= 1
        if self._users[node] <= 0:
            # gradients of leaves are accumulated at once, as the engine does
            order = -(1 << 60) if node.name().endswith("AccumulateGrad") else -node._sequence_nr()
            heapq.heappush(self._ready, (order, len(self._users), node))
            del self._users[node]

    def pop(self) -> tuple[Any, list[Any]] | None:
        """Removes the next node and its gradients, and returns them."""
        if not self._ready:
            return None
        node = heapq.heappop(self._ready)[2]
        return node, self._gradients.pop(node)


def _run(node: Any, gradients: list[Any], waiting: _Graph) -> None:
    edges = node.next_functions
    if hasattr(node, "variable"):
        _accumulate(node.variable, gradients[0])
        return
    if all(gradient is None for gradient in gradients):
        results: tuple[Any, ...] = (None,) * len(edges)
    else:
        results = _called(node, gradients)
    gradients.clear()
    for (after, number), result in zip(edges, results, strict=False):
        if after is not None:
            waiting.add(after, number, result)


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    leaf.grad = gradient.detach() if leaf.grad is None else leaf.grad.add_(gradient)
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def _called(node: Any, gradients: list[Any]) -> tuple[Any, ...]:
    """Calls a node of torch, or of a user's autograd function, which expects zeros for missing gradients."""
    is_custom = isinstance(node, BackwardCFunction)
    if is_custom:
        full = [
            torch.zeros(meta.shape, dtype=meta.dtype) if gradient is None else gradient
            for gradient, meta in zip(gradients, node._input_metadata, strict=True)
        ]
        results = node.apply(*full)
    else:
        results = node(*gradients)
    return results if isinstance(results, tuple) else (results,)
