"""Llama 3.1 as torchtitan trained it in December 2024: FSDP2, every other matrix product kept by the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRODUCT = torch.ops.aten.mm.default
KEPT = {PRODUCT, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
WIDTH, HEADS, KEYS, FFN, VOCAB, TOKENS = 4096, 32, 8, 14336, 128256, 8192


def contexts() -> tuple[Any, Any]:
    seen: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += operation == PRODUCT
        every_other = operation == PRODUCT and seen[context.is_recompute] % 2 == 0
        keep = operation in KEPT and not every_other
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    made: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return made


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles[None, :, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear: Callable[[int, int], nn.Linear] = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        keys = KEYS * WIDTH // HEADS
        self.wq, self.wk, self.wv, self.wo = (linear(WIDTH, n) for n in (WIDTH, keys, keys, WIDTH))
        self.w1, self.w2, self.w3 = linear(WIDTH, FFN), linear(FFN, WIDTH), linear(WIDTH, FFN)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.work, x, angles, use_reentrant=False, context_fn=contexts)

    def work(self, x: Tensor, angles: Tensor) -> Tensor:
        b, t, _ = x.shape
        n = self.attention_norm(x)
        q = rotate(self.wq(n).view(b, t, HEADS, -1), angles)
        k = rotate(self.wk(n).view(b, t, KEYS, -1), angles).repeat_interleave(HEADS // KEYS, dim=2)
        v = self.wv(n).view(b, t, KEYS, -1).repeat_interleave(HEADS // KEYS, dim=2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.wo(y.reshape(b, t, WIDTH))
        n = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        angles = torch.zeros(
            tokens.shape[1], WIDTH // HEADS // 2, dtype=torch.complex64, device=tokens.device
        )
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def make(layers: int = 32) -> nn.Module:
    return Llama(layers)


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, TOKENS, dtype=torch.long), torch.zeros(n, TOKENS, dtype=torch.long)
