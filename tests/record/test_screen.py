"""The start-up screen: golden at three widths, calm with bad input, plain where there is no terminal."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

from headway import __version__
from headway.dist import World
from headway.record import diagnostics, screen
from headway.record.screen import Screen
from headway.run import Run

GOLDEN = Path(__file__).parent / "golden"
SCREEN = Screen(
    name="digits",
    attempt=2,
    where="cn-l084, srun, 2 nodes x 4 ranks on NVIDIA H200",
    command="python train.py --lr 3e-4 --data /scratch/imagenet --epochs 90 --model vit-b16",
    files="runs/digits-2026.11.15-14.30-x7k2",
    log="tail -f runs/digits-2026.11.15-14.30-x7k2/log/rank-00000.txt",
    versions="python 3.11.7, torch 2.13.0+cu130, CUDA 13.0, driver 580.65.06",
    code="3f2a91c04b on main, uncommitted changes in code/",
    config=[
        "lr=0.0003",
        "batch_size=64",
        "model.depth=12",
        "model.width=768",
        "model.heads=12",
        "data.root=/scratch/imagenet",
        "epochs=90",
        "seed=0",
        "precision=bf16",
        "optimizer.betas=[0.9, 0.95]",
    ],
)
WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=1,
    host="laptop",
    launcher="none",
    device=torch.device("cpu"),
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_golden(width: int) -> None:
    shown = screen.render(SCREEN, width).plain
    assert shown == (GOLDEN / f"screen-{width}.txt").read_text().replace("VERSION", __version__)
    assert len(shown.splitlines()) <= 10


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_only_paths_are_wider_than_the_screen(width: int) -> None:
    long = dataclasses.replace(
        SCREEN,
        name="n" * 64,
        where="宿主" * 100,
        command="python " + "x" * 500,
        versions="v, " * 100,
        code="c" * 100,
        config=[f"key{n}=" + "値" * 90 for n in range(500)],
    )
    for line in screen.render(long, width).plain.splitlines():
        assert cell_len(line) <= width or "runs/digits" in line
    assert SCREEN.log in screen.render(SCREEN, width).plain, "a command that people copy is whole"


def test_no_control_character_gets_through() -> None:
    evil = "a\x1b]0;title\x07b\x1b[2Jc\nd\x9b\x00[red]"
    fields = {field.name: evil for field in dataclasses.fields(Screen) if field.type == "str"}
    assert len(fields) == 7
    shown = screen.render(dataclasses.replace(SCREEN, **fields, config=[evil]), 120)
    assert all(ord(character) >= 32 or character == "\n" for character in shown.plain)
    assert shown.plain.count("abc d[red]") == 8, "markup is text"
    assert len(shown.plain.splitlines()) == 9


def test_plain_text_in_a_file_and_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for file, coloured in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", file)
        screen.show(SCREEN)
        assert ("\x1b[" in file.getvalue()) is coloured
        assert SCREEN.log in file.getvalue(), "unbroken"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "laptop, 1 rank on cpu"),
        ({"launcher": "torchrun", "world_size": 4}, "laptop, torchrun, 4 ranks on cpu"),
        ({"launcher": "srun", "nodes": 2, "world_size": 8}, "laptop, srun, 2 nodes x 4 ranks on cpu"),
        ({"launcher": "srun", "nodes": 3, "world_size": 8}, "laptop, srun, 3 nodes, 8 ranks on cpu"),
    ],
)
def test_where(run: Run, changes: dict[str, object], words: str) -> None:
    facts = {"attempt": 1, **diagnostics.collect(WORLD, run)}
    assert screen.describe(run, dataclasses.replace(WORLD, **changes), facts).where == words  # type: ignore[arg-type]


def test_described_from_a_real_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent.parent)  # no repository here
    monkeypatch.setattr(
        sys, "orig_argv", ["/opt/bin/python3", "train.py", "--api-key", "canary-1", "--name", "a b"]
    )
    facts = {"attempt": 1, **diagnostics.collect(WORLD, run)}
    config = {"lr": 3e-4, "model": {"depth": 12, "none": None}, "wandb": {"api_key": "canary-2"}, "empty": {}}
    shown = screen.describe(run, WORLD, facts, config=config)
    assert shown.command == "python3 train.py --api-key '[redacted]' --name 'a b'"
    assert shown.files == f"runs/{run.path.name}"
    assert shown.log == f"tail -f runs/{run.path.name}/log/rank-00000.txt"
    assert shown.code == "not a git repository"
    assert shown.config == [
        "lr=0.0003",
        "model.depth=12",
        "model.none=None",
        "wandb.api_key=[redacted]",
        "empty={}",
    ]
    assert f"torch {torch.__version__}" in shown.versions
    assert "canary" not in screen.render(shown, 200).plain


def test_a_job_shows_the_script_and_not_the_path_of_its_copy(run: Run) -> None:
    facts = {"attempt": 1, **diagnostics.collect(WORLD, run)}
    facts["argv"] = ["/opt/bin/python3", f"{run.work_dir}/src/train.py", "--lr", "0.1"]
    assert screen.describe(run, WORLD, facts).command == "python3 src/train.py --lr 0.1"


def test_paths_elsewhere_are_absolute_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path / "my runs", name="digits")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shown = screen.describe(run, WORLD, {"attempt": 1, **diagnostics.collect(WORLD, run)})
    assert shown.files == f"'{run.path}'"
    assert shown.log == f"tail -f '{run.log_file(0)}'"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"commit": "0123456789abcdef", "branch": "main"}, "0123456789 on main"),
        ({"commit": "0123456789abcdef", "dirty": True}, "0123456789, uncommitted changes in code/"),
        ({"note": "not a git repository (or any parent)"}, "not a git repository"),
        ({}, "a git repository without a commit"),
    ],
)
def test_code(run: Run, state: dict[str, object], words: str) -> None:
    facts = {"attempt": 1, **diagnostics.collect(WORLD, run)}
    facts["code"] = {"commit": None, "branch": None, "dirty": False, "note": None, **state}
    assert screen.describe(run, WORLD, facts).code == words
