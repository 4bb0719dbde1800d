"""Loops that pages show: they clear gradients, and their numbers are those of a loop written by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import headway as hw
from headway import dist

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
SCRIPTS = sorted(ROOT.glob("examples/**/*.py"))


def blocks(page: Path) -> list[str]:
    if page.suffix == ".py":
        return [page.read_text()]
    return re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def stage_of(page: str, name: str) -> Any:
    """The class of that name as a page shows it."""
    (node,) = [
        node
        for block in blocks(ROOT / page)
        for node in ast.parse(block).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    scope: dict[str, Any] = {"hw": hw, "torch": torch}
    exec(compile(ast.Module([node], []), page, "exec"), scope)
    return scope[name]()


def test_what_steps_also_clears() -> None:
    updating = {
        (page, block)
        for page in PAGES + SCRIPTS
        for block in blocks(page)
        if ".backward()" in block and re.search(r"\.step\(\)|step_optimizer\(", block)
    }
    assert len(updating) > 5
    assert {str(page) for page, block in updating if "zero_grad" not in block} == set()


def trained(stage: Any, tmp_path: Path, keep_best: str | None = None) -> tuple[hw.Pipeline, torch.nn.Linear]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    pipe = hw.Pipeline(name="own")
    pipe.register_model("net", net)
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=0.1), model="net")
    pipe.register_dataset("train", loader(96, 0))
    pipe.register_dataset("val", loader(21, 1))
    pipe.append_stage(stage, max_epochs=2)
    pipe.enable_checkpointing(tmp_path, every="1 epoch", keep_best=keep_best, background=False)
    pipe.run()
    return pipe, net


def loader(count: int, seed: int) -> Any:
    data = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return hw.data.DataLoader(TensorDataset(data), batch_size=16, shuffle=True, seed=0)


def by_hand(clip: float | None = None) -> torch.nn.Linear:
    torch.manual_seed(0)
    net, train = torch.nn.Linear(4, 1), loader(96, 0)
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        for (x,) in train:
            adamw.zero_grad()
            net(x).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            adamw.step()
    return net


@pytest.mark.parametrize(
    ("page", "name", "hand"),
    [
        ("docs/coming-from/accelerate.md", "OwnLoop", lambda: by_hand(clip=1.0)),
        ("docs/train.md", "Accumulate", by_hand),
        ("docs/coming-from/dmlcloud.md", "MyStage", by_hand),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_loop_gives_the_numbers_of_one_written_by_hand(
    page: str, name: str, hand: Callable[[], torch.nn.Linear], tmp_path: Path
) -> None:
    _, net = trained(stage_of(page, name), tmp_path)
    torch.testing.assert_close(net.weight, hand().weight)


def test_a_validation_in_a_loop_of_your_own_is_no_step_and_chooses_the_best(tmp_path: Path) -> None:
    pipe, net = trained(stage_of("docs/train.md", "Fit"), tmp_path, keep_best="val/loss")
    with torch.no_grad():
        losses = torch.cat([net(x).square() for (x,) in loader(21, 1)])
    assert pipe.steps_done == 12
    assert pipe.history["val/loss"][-1] == pytest.approx(losses.mean().item())
    assert hw.checkpoint.load_best(pipe.directory).metrics["val/loss"] == pytest.approx(losses.mean().item())


TORCHRUN = re.search(
    r'title="train.py"\n(.*?)^```',
    (ROOT / "docs/coming-from/torchrun.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("killed_at", [7, 8, 11])
def test_the_loop_without_a_pipeline_resumes_exactly_and_keeps_its_best(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in this process: killed within an epoch, right after its end, and after the first save of the next."""
    assert TORCHRUN
    script = TORCHRUN[1]
    cut = script.replace(
        "        step += 1\n",
        f"        step += 1\n        if step == {killed_at + 1}: raise KeyboardInterrupt\n",
    )
    assert cut != script
    ends = []
    for name, parts in {"whole": [script], "killed": [cut, script]}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for part in parts:
            scope: dict[str, Any] = {"__name__": "__main__"}
            with pytest.raises(KeyboardInterrupt) if part is cut else nullcontext():
                exec(part, scope)
            dist.leave()
        end = hw.checkpoint.load_latest("checkpoints")
        assert end is not None
        ends.append(end)
        assert scope["step"] == 24
    whole, killed = ends
    assert torch.equal(whole.state["net"]["1.weight"], killed.state["net"]["1.weight"])
    assert (whole.metrics, whole.local) == (killed.metrics, killed.local)
