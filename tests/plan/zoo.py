"""The eight models that were measured on an H200, by name; traced by the tests in other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "h200.jsonl").read_text().splitlines()]


def make(row: int, layers: int = 0) -> nn.Module:
    """The model of one measured row, with fewer layers if they are given."""
    facts = {**ROWS[row], "L": layers} if layers else ROWS[row]
    return LanguageModel(facts) if facts["kind"] == "lm" else VISION[facts["model"]]()


def language_batch(n: int, tokens: int = 1024) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, tokens, dtype=torch.long), torch.zeros(n, tokens, dtype=torch.long)


def long_batch(n: int) -> tuple[Tensor, Tensor]:
    return language_batch(n, 4096)


def image_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)


class Block(nn.Module):
    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        d, h, kv, ffn, gated = (facts[key] for key in ("d", "h", "kv", "ffn", "swiglu"))
        self.shape, self.gated = (h, kv, d // h), gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.before_attention, self.before_mlp = norm(d), norm(d)
        self.q = nn.Linear(d, d, bias=not gated)
        self.k, self.v = (nn.Linear(d, kv * d // h, bias=not gated) for _ in range(2))
        self.out = nn.Linear(d, d, bias=not gated)
        self.up, self.down = nn.Linear(d, ffn, bias=not gated), nn.Linear(ffn, d, bias=not gated)
        self.gate = nn.Linear(d, ffn, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h, kv, dim = self.shape
        n = self.before_attention(x)
        q = self.q(n).view(b, t, h, dim).transpose(1, 2)
        k = self.k(n).view(b, t, kv, dim).transpose(1, 2)
        v = self.v(n).view(b, t, kv, dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != kv)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        n = self.before_mlp(x)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(n)) * self.up(n))
        return x + self.down(F.gelu(self.up(n)))


class LanguageModel(nn.Module):
    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        self.recompute = facts["ckpt"]
        self.tokens = nn.Embedding(facts["V"], facts["d"])
        self.positions = None if facts["swiglu"] else nn.Embedding(facts["T"], facts["d"])
        self.blocks = nn.ModuleList(Block(facts) for _ in range(facts["L"]))
        self.norm = (nn.RMSNorm if facts["swiglu"] else nn.LayerNorm)(facts["d"])
        self.head = nn.Linear(facts["d"], facts["V"], bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


class Bottleneck(nn.Module):
    def __init__(self, inp: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        short = [nn.Conv2d(inp, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)]
        self.short = nn.Sequential(*short) if inp != 4 * width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.short is None else self.short(x)
        return F.relu(y, inplace=True)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inp = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inp, 64 << stage, 2 if stage and not block else 1))
            inp = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(768, eps=1e-6), nn.LayerNorm(768, eps=1e-6)
        self.attention = nn.MultiheadAttention(768, 12, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))

    def forward(self, x: Tensor) -> Tensor:
        n = self.ln_1(x)
        x = self.attention(n, n, n, need_weights=False)[0] + x
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 768))
        self.positions = nn.Parameter(torch.zeros(1, 197, 768))
        self.blocks = nn.Sequential(*(EncoderBlock() for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768, eps=1e-6), nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class ConvBlock(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.depthwise, self.norm = (
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.LayerNorm(width, eps=1e-6),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        if self.drop:
            y = y * torch.empty(len(x), 1, 1, 1, dtype=y.dtype, device=y.device).bernoulli_(1 - self.drop)
        return y + x


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    done, widths, depths = 0, (96, 192, 384, 768), (3, 3, 9, 3)
    for width, depth, following in zip(widths, depths, (*widths[1:], None), strict=True):
        for _ in range(depth):
            layers.append(ConvBlock(width, 0.1 * done / (sum(depths) - 1)))
            done += 1
        if following:
            layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, following, 2, 2)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), ChannelNorm(768, eps=1e-6), nn.Flatten(), nn.Linear(768, 1000)
    )


VISION = {"resnet50": resnet50, "vit_b_16": VisionTransformer, "convnext_tiny": convnext_tiny}


def tiny_language_model(layers: int = 2) -> nn.Module:
    facts = {
        "L": layers,
        "d": 64,
        "h": 4,
        "kv": 2,
        "ffn": 128,
        "V": 1000,
        "T": 64,
        "swiglu": True,
        "ckpt": False,
    }
    return LanguageModel(facts)


def tiny_batch(n: int) -> tuple[Tensor, Tensor]:
    return language_batch(n, 64)


class Choosy(nn.Module):
    """Looks at its data: cannot be traced without any."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[y > 0].sum() if y.sum().item() > 0 else y.sum()


def choosy() -> nn.Module:
    return Choosy()


def float_batch(n: int = 4) -> Tensor:
    return torch.zeros(n, 64)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64))


def converted() -> nn.Module:
    """Built as people build: drop rates read off a tensor, the module cast and moved."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3) * 2]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(rate)) for rate in rates))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").bfloat16()


def half_batch(n: int = 4) -> Tensor:
    return torch.zeros(n, 64, dtype=torch.bfloat16)


def loader() -> Any:
    return (half_batch(1024) for _ in range(100))


def dies() -> nn.Module:
    import os

    os.abort()


def broken() -> nn.Module:
    raise RuntimeError("no such weights")


def pair() -> tuple[nn.Module, Tensor]:
    return plain(), torch.zeros(8, 64)


class Experts(nn.Module):
    """Four experts as one grouped product, as in transformers; a loop over products with `loop`."""

    def __init__(self, *, loop: bool) -> None:
        super().__init__()
        self.loop = loop
        self.up = nn.Parameter(torch.zeros(4, 64, 128))
        self.down = nn.Parameter(torch.zeros(4, 128, 64))

    def forward(self, x: Tensor) -> Tensor:
        if self.loop:
            parts = x.split(len(x) // 4)
            return torch.cat(
                [p @ up @ down for p, up, down in zip(parts, self.up, self.down, strict=True)]
            ).sum()
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) // 4)
        return F.grouped_mm(F.grouped_mm(x, self.up, offs=ends), self.down, offs=ends).sum()


class LayerDrop(nn.Sequential):
    """Leaves a layer out by chance, as Whisper and wav2vec do: a number is drawn and looked at."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x if torch.rand([]) < 0.1 else layer(x)
        return x.sum()


def layer_drop() -> nn.Module:
    return LayerDrop(nn.Linear(64, 64), nn.Linear(64, 64))


def experts(loop: int) -> nn.Module:
    return Experts(loop=bool(loop))


def wrong() -> int:
    return 7
