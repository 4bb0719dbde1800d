"""Validation of several sets, before the first step, and outside of training: the same numbers on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from toys import Batches, Classify, make_net, make_pipe

from headway.system import jsonlines


class TwoSets(Classify):
    def val_dataset(self) -> Any:
        return {"val": self.datasets["val"], "ood": self.datasets["ood"]}


def by_hand(net: torch.nn.Module, batches: Batches) -> tuple[float, float]:
    """Loss and accuracy over all samples."""
    net.eval()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        logits = net(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def test_several_sets_and_a_validation_before_the_first_step(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", Batches(3, rank=1, sizes=lambda number: 16 - 5 * number))
    pipe.register_dataset("ood", Batches(2, rank=2))
    pipe.append_stage(TwoSets(val_at_start=True, val_every="2 epochs"), max_epochs=2)
    run = pipe.run()
    rows = list(jsonlines.read(run.metrics_file(0)))
    first, last = (row for row in rows if row["kind"] == "validation")
    assert (first["step"], last["step"]) == (0, 8)
    for row, net in ((first, make_net()), (last, pipe.registered_models["net"].bare)):
        for name, batches in (("val", pipe.datasets["val"]), ("ood", pipe.datasets["ood"])):
            loss, accuracy = by_hand(net, batches)  # type: ignore[arg-type]
            torch.testing.assert_close(row["metrics"][f"{name}/loss"], loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(row["metrics"][f"{name}/accuracy"], accuracy, rtol=1e-6, atol=0)
    one, two = pipe.history.epochs
    assert "val/loss" not in one.values  # the validation before the first step is not the epoch's
    assert two.values["ood/loss"] == last["metrics"]["ood/loss"]
