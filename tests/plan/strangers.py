"""Models that no constant of the planner was made for: their peaks are measured on a GPU and compared with the trace.

Each entry of `MODELS`: what makes the module, what makes a batch, a batch size, the loss if the module has none itself.
Those whose names begin with `tv_` come from torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A basic block with group norm and SiLU, out of place."""

    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inp, out, 3, stride, 1), nn.GroupNorm(16, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1), nn.GroupNorm(16, out)
        self.short = nn.Conv2d(inp, out, 1, stride) if stride > 1 or inp != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.short(x))


def group_resnet() -> nn.Module:
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.SiLU(), nn.MaxPool2d(3, 2, 1)]
    for inp, out in zip([64, *widths], widths, strict=False):
        layers.append(Residual(inp, out, 1 if inp == out else 2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 1000)
    )


class UNet(nn.Module):
    """Down, up, and the skips that keep early activations alive; the loss is a mean square."""

    def __init__(self, base: int = 64) -> None:
        super().__init__()
        widths = [base, 2 * base, 4 * base, 8 * base]
        pairs = list(pairwise(widths))
        self.first = nn.Conv2d(3, base, 3, 1, 1)
        self.down = nn.ModuleList(Residual(a, b, 2) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(Residual(2 * a, a, 1) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(base, 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.first(image)
        kept = []
        for block in self.down:
            kept.append(x)
            x = block(x)
        for grow, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([grow(x), kept.pop()], dim=1))
        return F.mse_loss(self.last(x), target)


class PlainGpt(nn.Module):
    """nn.TransformerEncoderLayer with dropout, post-norm, and an untied head."""

    def __init__(self, width: int = 768, layers: int = 8, words: int = 32_000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), device=tokens.device).triu(1)
        x = self.blocks(x, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class HandAttention(nn.Module):
    """Scores written out: they are kept, masked and dropped."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(
            torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        y = self.drop(scores.softmax(-1)) @ v
        return x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))


class Experts(nn.Module):
    """Eight experts, two per token, with a capacity: shapes do not depend on the data."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        n = self.norm(x).view(-1, d)
        gates, chosen = self.router(n).softmax(-1).topk(2)
        count, capacity = len(self.up), 2 * len(n) // len(self.up)
        order = chosen.flatten().argsort()[: count * capacity]
        rows = n[order // 2].view(count, capacity, d)
        y = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)
        y = y.view(-1, d) * gates.flatten()[order, None]
        return x + torch.zeros_like(n, dtype=y.dtype).index_add_(0, order // 2, y).view(b, t, d)


class MoeGpt(nn.Module):
    def __init__(self, width: int = 512, layers: int = 6, words: int = 32_000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(HandAttention(width, 8), Experts(width)) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class LstmModel(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 3, words: int = 32_000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.lstm(self.words(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)  # type: ignore[no-any-return]


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)


def pictures(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 3, 256, 256), torch.zeros(n, 3, 256, 256)


def sentences(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 512, dtype=torch.long), torch.zeros(n, 512, dtype=torch.long)


class Stranger(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    size: int
    loss: str | None = None


MODELS = {
    "group_resnet": Stranger(group_resnet, images, 128, "cross_entropy"),
    "unet": Stranger(UNet, pictures, 32),
    "plain_gpt": Stranger(PlainGpt, sentences, 16),
    "moe_gpt": Stranger(MoeGpt, sentences, 16),
    "lstm": Stranger(LstmModel, sentences, 32),
}
for _name, _size in {
    "resnet18": 256, "vgg16_bn": 64, "densenet121": 64, "mobilenet_v3_large": 128, "efficientnet_v2_s": 64,
    "swin_t": 64, "regnet_y_8gf": 64, "vit_l_16": 32, "convnext_base": 64, "maxvit_t": 32,
}.items():  # fmt: skip
    MODELS[f"tv_{_name}"] = Stranger(partial(torchvision_model, _name), images, _size, "cross_entropy")
NAMES = list(MODELS)


def make(which: int) -> nn.Module:
    """The model with this number: factories take whole numbers."""
    return MODELS[NAMES[which]].make()
