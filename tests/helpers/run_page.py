"""Runs the Python examples of pages one after the other, in one namespace, with what a page takes for granted.

python run_page.py '{"docs/train.md": [8]}'      all examples of the page but number 8
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def examples(page: Path) -> list[str]:
    """The examples of a page that are no whole scripts: these have a title, and a test of their own."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def around() -> dict[str, Any]:
    """The names that pages use without saying where they come from."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import headway as hw

    class Net(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)

    class Labeled(TensorDataset):
        targets = torch.arange(64) % 3

    class Classify(hw.TrainValStage):
        def step(self, batch: Any) -> Any:
            return F.cross_entropy(self.models["net"](batch[0]), batch[1])

        def predict(self, batch: Any) -> Any:
            return self.models["net"](batch[0])

    def train(*_: Any, **__: Any) -> dict[str, float]:
        return {"accuracy": 1.0}

    data = Labeled(torch.ones(64, 4), torch.arange(64) % 3)
    net = Net()
    adamw = torch.optim.AdamW(net.parameters())
    samples = [{"__key__": f"{i:03}", "npy": np.ones(3, np.float32), "cls": i % 3} for i in range(300)]
    for name in ("photos", "web", "books"):
        hw.data.pack(samples, f"catalog/public/arrays/{name}/train", shuffle=True)
    os.environ["HEADWAY_DATA"] = str(Path("catalog").absolute())
    return {
        "hw": hw, "headway": hw, "torch": torch, "F": F, "np": np, "os": os, "sys": sys, "Path": Path,
        "DataLoader": DataLoader, "Net": Net, "Classify": Classify, "train": train, "net": net, "model": net,
        "adamw": adamw, "optimizer": adamw, "dataset": data, "train_set": data, "val_set": data,
        "train_loader": hw.data.DataLoader(data, 16, shuffle=True, seed=0), "val_loader": hw.data.DataLoader(data, 16),
        "test_loader": hw.data.DataLoader(data, 16), "ood_loader": hw.data.DataLoader(data, 16),
        "loader": hw.data.DataLoader(data, 16, shuffle=True, seed=0), "batch": torch.ones(2, 4), "accuracy": 0.5,
        "my_handler": logging.NullHandler(), "download": lambda: data, "unpack": print, "config": {"lr": 3e-4},
        "world": hw.init(device="cpu"), "loss": net(torch.ones(2, 4)).sum(),
    }  # fmt: skip


def of_page(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """What one page alone takes for granted."""
    hw = names["hw"]
    if page.endswith("shards.md"):
        mix = hw.data.Mix({"photos": 0.7, "web": 0.3})
        return {"mix": mix, "loader": hw.data.ShardLoader(mix, batch_size=16, seed=0)}
    if page.endswith("reliability.md"):
        return {"train": names["train_loader"], "state": {"net": names["net"].state_dict()}}
    if page.endswith("plan.md"):
        from headway.cli import main as headway_command

        layout = ["--node", "h200-sxm1", "--microbatch", "8", "--global-batch", "8"]
        assert headway_command(["plan", "preset", "gpt2", *layout, "--save", "plan.json"]) == 0
    return {}


def trained(names: dict[str, Any]) -> Any:
    """A run that has been trained, under the ids that pages use."""
    hw = names["hw"]
    pipe = hw.Pipeline(name="digits")
    pipe.register_model("net", names["Net"]())
    make = names["torch"].optim.AdamW
    pipe.register_optimizer("adamw", lambda params: make(params, lr=0.01), model="net")
    pipe.register_dataset("train", names["train_loader"])
    pipe.register_dataset("val", names["val_loader"])
    pipe.append_stage(names["Classify"](), max_epochs=1)
    pipe.enable_checkpointing("runs", every="1 epoch", keep_best="val/loss")
    pipe.enable_ledger()
    run = pipe.run()
    for other in ("digits-2026.11.15-14.30-x7k2", "rings-2026.11.15-14.30-m3p9"):
        copy = run.path.with_name(other)
        shutil.copytree(run.path, copy)
        info = copy / "run.json"
        name = other.partition("-")[0]
        info.write_text(info.read_text().replace(run.id, other).replace('"digits"', f'"{name}"'))
    return run


def main(pages: dict[str, list[int]]) -> int:
    """Runs the examples of all pages, without those of these numbers, each page in a copy of one directory."""
    first = around()
    first["run"] = trained(first)
    sys.modules["page"] = types.ModuleType("page")
    start, failed = Path.cwd(), 0
    for page, left_out in pages.items():
        directory = start.parent / f"{start.name}-{Path(page).stem}"
        shutil.copytree(start, directory)
        os.chdir(directory)
        names = {**first, "__name__": "page", "pipe": first["hw"].Pipeline(name="digits")}
        names |= of_page(page, names)
        for number, code in enumerate(examples(ROOT / page)):
            names["Classify"] = first["Classify"]  # an earlier one may have only what it shows
            if number not in left_out:
                failed += not runs(code, f"{page}, example {number}", names)
        os.chdir(start)
    return failed


def runs(code: str, where: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(code, where, "exec"), names)
        return True
    except Exception:  # noqa: BLE001  all of them are reported
        print(f"--- {where}\n{code}", file=sys.stderr)
        traceback.print_exc()
        return False


if __name__ == "__main__":
    sys.exit(min(main(json.loads(sys.argv[1])), 99))
