"""A device without double precision, as Apple's MPS: nothing of a run makes a float64 tensor on it.

There is none here. The CPU stands for it: `exact_dtype` answers as for MPS, and each operation of torch whose result is
float64 is noted, except where the tensor is one of the host on every device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import Batches, Classify, make_net, make_pipe

import headway as hw
from headway.dist import device
from headway.record.media.content import count_values

ON_HOST = {  # by the function: they have copied to the host, or name no device
    "gather_rows",
    "gather_lengths",
    "write",  # the ledger
}


def has_doubles(values: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_leaves(values))


class NoDoubles(TorchDispatchMode):
    """Notes where a float64 tensor is made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        new = func is torch.ops.aten.lift_fresh.default or not has_doubles((args, kwargs))  # torch.tensor()
        if has_doubles(result) and new:
            frame = sys._getframe(1)
            while "headway" not in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if frame.f_code.co_name not in ON_HOST:
                self.found.add(f"{func} in {frame.f_code.co_filename}:{frame.f_lineno}")
        return result


class Everything(Classify):
    """Logs values and weights of all kinds; returns means over samples or over tokens."""

    weighs = False

    def step(self, batch: Any) -> Any:
        loss = super().step(batch)
        for kind in ("mean", "sum", "min", "max", "last"):
            for number, (value, weight) in enumerate(
                [(loss, 2), (1.0, loss.detach() != 0), (loss[None], torch.tensor(3))]
            ):
                self.log(f"{kind}-{number}", value, weight=weight, reduce=kind)  # type: ignore[arg-type]
        self.log("mine", loss, scope="rank")
        count_values(batch[0], bins=8)  # as log_histogram does of a tensor on a device
        return (loss, len(batch[1])) if self.weighs else loss

    def predict(self, batch: Any) -> Tensor:
        return self.models["net"](batch[0])  # type: ignore[no-any-return]


class Weighs(Everything):
    weighs = True


@pytest.mark.usefixtures("alone")
def test_a_run_makes_no_float64_tensor_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = torch.device("mps")
    answer = device.exact_dtype
    assert answer(single) == torch.float32
    for module in [module for name, module in sys.modules.items() if name.startswith("headway")]:
        if vars(module).get("exact_dtype") is answer:
            monkeypatch.setattr(module, "exact_dtype", lambda _: answer(single))
    with NoDoubles() as doubles:
        pipe = make_pipe(tmp_path, net=make_net(), ema=0.9)
        for name in ("train", "val", "ood", "test"):
            pipe.register_dataset(name, Batches(5, sizes=lambda number: 16 - number))
        for stage in (
            Everything(log_every=2, gradient_clip=1.0, on_nan="skip"),
            Weighs(log_every=2, val_every="2 steps", accumulate=2),
            Everything(log_every=2, accumulate=2, uneven="longest"),
        ):
            pipe.append_stage(stage, max_epochs=1, name=f"stage-{len(pipe.stages)}")
        pipe.enable_checkpointing(tmp_path, every="2 steps")
        pipe.enable_ledger()
        pipe.run()
        pipe.validate(stage, weights="current")
        pipe.test(stage, weights="current")
        numbers = torch.utils.data.TensorDataset(torch.randn(9, 10))
        pipe.predict(stage, hw.data.DataLoader(numbers, batch_size=4), tmp_path / "x.npy", weights="current")
    assert sorted(doubles.found) == []
    assert doubles.operations > 1_000
