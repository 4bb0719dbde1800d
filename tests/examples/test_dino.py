"""examples/dino: the loss."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from headway import dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "dino" / "train.py"


def test_the_loss_is_that_of_the_papers_term_by_term() -> None:
    dino = runpy.run_path(str(EXAMPLE))
    out = 5
    draw = torch.Generator().manual_seed(0)
    classes, patches = torch.randn(4 * 3, out, generator=draw), torch.randn(2 * 3, 4, out, generator=draw)
    seen, whole = torch.randn(2 * 3, out, generator=draw), torch.randn(2 * 3, 4, out, generator=draw)
    masks = torch.rand(6, 4, generator=draw) < 0.5
    masks[1] = False
    dist.init()
    loss = dino["DinoLoss"](out)
    loss.centers.copy_(torch.randn(2, out, generator=draw))
    centers = loss.centers.clone()
    found = loss((classes, patches), (seen, whole), masks, n_large=2)

    def entropy(target: torch.Tensor, center: torch.Tensor, view: torch.Tensor) -> float:
        wanted = ((target - center) / 0.04).softmax(-1)
        return -float((wanted * (view / 0.1).log_softmax(-1)).sum())

    pairs = [
        entropy(seen[3 * i + n], centers[0], classes[3 * j + n])
        for i in range(2)
        for j in range(4)
        for n in range(3)
        if i != j
    ]
    assert float(found[0]) == pytest.approx(np.mean(pairs), rel=1e-5)
    hidden = [
        np.mean([entropy(whole[n, at], centers[1], patches[n, at]) for at in range(4) if masks[n, at]])
        for n in range(6)
        if masks[n].any()
    ]
    assert float(found[1]) == pytest.approx(np.mean(hidden), rel=1e-5)
    expected = 0.9 * centers + 0.1 * torch.stack([seen.mean(0), whole.flatten(0, 1).mean(0)])
    torch.testing.assert_close(loss.centers, expected)
    dist.leave()
