"""Every whole script that a page shows is run as it stands; so are the files and commands that belong to it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from page_blocks import titled

from headway.cli import main

ROOT = Path(__file__).parents[2]
COMING_FROM = sorted(path for path in ROOT.glob("docs/coming-from/*.md") if path.stem != "index")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *COMING_FROM]


SCRIPTS = [page for page in PAGES if titled(page, "train.py")]


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_script_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(titled(page, "train.py") or "")
    if "hw.launch" in script.read_text():  # its ranks start at once if they are started from here
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "Popen", warm.Popen)
        runpy.run_path(str(script), run_name="__main__")
        return
    done = warm.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_each_page_has_a_table_what_differs_and_both_scripts(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^## (\w+ ?\w*)", text, re.MULTILINE)
    assert [*headings] == ["What differs", "Before", "After"], headings
    assert len(re.findall(r"^\| .+ \| .+ \|$", text, re.MULTILINE)) > 6
    assert titled(page, "before") or titled(page, "old.yaml")
    assert page in SCRIPTS
    assert f"({page.name})" in (page.parent / "index.md").read_text()


def test_a_file_of_dlcalc_becomes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "coming-from" / "dlcalc.md"
    (tmp_path / "old.yaml").write_text(titled(page, "old.yaml") or "")
    assert main(["plan", "import-dlcalc", str(tmp_path / "old.yaml")]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "fits" in capsys.readouterr().out


def test_the_settings_of_a_site_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(titled(ROOT / "docs" / "slurm.md", "cluster.yaml") or "")
    Path("train.py").touch()
    assert main(["submit", "--dry-run", "--on", "cluster.yaml", "--nodes", "2", "train.py"]) == 0
    script = capsys.readouterr().out
    assert "--account=vision" in script and "module load cuda/12.8" in script
