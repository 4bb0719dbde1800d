"""Every Python example in the documentation runs; what cannot run here is listed with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm
from run_page import examples

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
LEFT_OUT = {
    ("docs/data.md", 3): "needs zarr; tests/examples has weather",
    ("docs/images.md", 0): "needs photos and a GPU; tests/data and tests/gpu have both",
    ("docs/images.md", 1): "needs DALI; tests/data/test_dali_source.py reads as it does",
    ("docs/joining.md", 3): "dots stand for arguments of your own",
    ("docs/launch.md", 0): "needs a cluster; tests/cluster/test_launch.py has one",
    ("docs/launch.md", 1): "needs a cluster; tests/cluster/test_launch.py has one",
    ("docs/launch.md", 2): "names data of a site; tests/data/test_staging.py stages",
    ("docs/launch.md", 3): "tests/docs/test_schedulers_page.py runs it",
    ("docs/models.md", 1): "names weights of others; tests/train/test_initial_weights.py",
    ("docs/shards.md", 0): "names shards of a site; tests/docs/test_scripts.py packs and reads some",
    ("docs/sinks.md", 0): "names servers of a site; tests/record/test_sinks.py has the trackers",
    ("docs/sinks.md", 2): "a sink is imported from a file; tests/record/test_own_sink.py has it in one",
    ("docs/testing.md", 0): "four processes; tests/testing/test_docs.py",
    ("docs/topology.md", 3): "needs a GPU",
}


def test_the_examples_run(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    pages = {page: [number for where, number in LEFT_OUT if where == page] for page in PAGES}
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "run_page.py"), json.dumps(pages)]
    done = warm.run(command, cwd=tmp_path / "all", capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "number"), LEFT_OUT)
def test_what_is_left_out_is_there(page: str, number: int) -> None:
    assert number < len(examples(ROOT / page))


def test_most_examples_run() -> None:
    count = sum(len(examples(ROOT / page)) for page in PAGES)
    assert count - len(LEFT_OUT) > 35
