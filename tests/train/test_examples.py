"""The examples run as they say they do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import warm
from PIL import Image

import headway as hw
from headway.cli import main

IMAGENET = Path(__file__).parents[2] / "examples" / "imagenet.py"


def headway_run(folder: Path, *words: str, **environ: str) -> str:
    usual = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [sys.executable, "-m", "headway", "run", *words],
        env=usual | environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_imagenet_counts_every_picture_once_on_two_ranks(tmp_path: Path) -> None:
    tiny = ["--size", "16", "--batch", "2", "--epochs", "1"]
    headway_run(tmp_path, "--nproc", "2", str(IMAGENET), *tiny, "--dummy-model")
    (rows,) = tmp_path.glob("runs/imagenet-*/metrics/rank-00000.jsonl")
    (row,) = [row for row in map(json.loads, rows.read_text().splitlines()) if row["kind"] == "validation"]
    assert row["metrics"]["val/images"] == 7, "a short last batch, and no sample twice"
    assert {"val/loss", "val/top1", "val/top5"} <= row["metrics"].keys()


def pack_pictures(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part, count in {"train": 6, "val": 3}.items():
        for label in ("cat", "dog"):
            folder = tmp_path / "pictures" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (20, 30 + number, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
        hw.data.pack(tmp_path / "pictures" / part, tmp_path / "shards" / part)


def test_imagenet_trains_on_shards_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    pack_pictures(tmp_path)
    tiny = ["--size", "16", "--batch", "2", "--epochs", "2", "--data", "shards"]
    said = headway_run(tmp_path, "--smoke", str(IMAGENET), *tiny)
    assert "dataset train: 6 batches" in said and "from step 2" in said


def test_imagenet_trains_on_staged_shards(tmp_path: Path) -> None:
    pack_pictures(tmp_path)
    assert main(["data", "stage", "--tmp", str(tmp_path / "disk"), str(tmp_path / "shards")]) == 0
    shutil.rmtree(tmp_path / "shards")  # only what was staged is left
    tiny = [
        "--size",
        "16",
        "--batch",
        "2",
        "--epochs",
        "1",
        "--data",
        str(tmp_path / "shards"),
        "--dummy-model",
    ]
    said = headway_run(tmp_path, str(IMAGENET), *tiny, HEADWAY_STAGED=str(tmp_path / "disk"))
    assert "dataset train: 6 batches" in said and "dataset val: 3 batches" in said
