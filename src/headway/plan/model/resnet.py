"""Residual networks: exact parameters and multiply-adds, layer by layer.

Only counts. Peak memory and time of a convolutional network come from tracing it (`headway plan module`),
because they depend on the layer library's workspaces more than on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan import checks

_STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """A residual network of He et al. 2015, as torchvision builds it (stride in the 3 x 3 convolution).

    >>> ResNet(depth=50).parameters
    25557032
    """

    depth: int
    classes: int = 1000
    size: int = 224

    def __post_init__(self) -> None:
        checks.one_of("model.depth", self.depth, tuple(_STAGES))
        checks.whole("model.classes", self.classes)
        checks.whole("model.size", self.size, at_least=32)

    @property
    def parameters(self) -> int:
        return sum(out * (inp * kernel * kernel + 2) for inp, out, kernel, _ in self._convolutions()) + (
            self._features * self.classes + self.classes
        )

    @property
    def forward_macs(self) -> int:
        """Multiply-adds of one image forward."""
        convolutions = sum(inp * out * k * k * side * side for inp, out, k, side in self._convolutions())
        return convolutions + self._features * self.classes

    @property
    def _features(self) -> int:
        return 512 * self._expansion

    @property
    def _expansion(self) -> int:
        return 1 if self.depth < 50 else 4

    def _convolutions(self) -> list[tuple[int, int, int, int]]:
        """(channels in, out, kernel, output side) of every convolution; each has a norm (2 per channel)."""
        side = -(-self.size // 2)
        found = [(3, 64, 7, side)]
        inp, side = 64, -(-side // 2)
        for stage, blocks in enumerate(_STAGES[self.depth]):
            width = 64 * 2**stage
            for block in range(blocks):
                before, out = side, width * self._expansion
                if stage > 0 and block == 0:
                    side = -(-side // 2)
                if self._expansion == 1:
                    found += [(inp, width, 3, side), (width, width, 3, side)]
                else:
                    found += [(inp, width, 1, before), (width, width, 3, side), (width, out, 1, side)]
                if inp != out:
                    found.append((inp, out, 1, side))
                inp = out
        return found
