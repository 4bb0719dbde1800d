"""The package: what is built is complete, the same from the sdist, and works where the source tree is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import headway

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headway"
RECIPES = ROOT / "recipes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds a wheel or sdist as pip does, with the build backend of this interpreter."""
    backend = pytest.importorskip("hatchling.build")
    before = Path.cwd()
    os.chdir(source)
    try:
        make: Callable[[str], str] = getattr(backend, f"build_{kind}")
        return out / make(str(out))
    finally:
        os.chdir(before)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    built = {name for name in contents(wheel) if name.startswith("headway/")}
    on_disk = {
        path.relative_to(ROOT / "src").as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert built == on_disk
    kinds = {Path(name).suffix for name in built}
    assert {".py", ".yaml", ".js", ".css", ".html", ".svg"} <= kinds and "headway/py.typed" in built


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path)) as file:
        file.extractall(tmp_path, filter="data")
    source = tmp_path / f"headway-{headway.__version__}"
    assert {path.name for path in source.iterdir()} >= {
        "CITATION.cff",
        "CHANGELOG.md",
        "examples",
        "recipes",
        "tests",
    }
    assert contents(build("wheel", source, tmp_path)) == contents(wheel)


def test_what_the_dockerfile_copies_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)
    source = tmp_path / "source"
    source.mkdir()
    for name in " ".join(copied).split():
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, source / name)
    assert contents(build("wheel", source, tmp_path)) == contents(wheel)


def test_the_wheel_works_where_the_source_tree_is_not(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, as an installation is. Every environment of its own, with every extra, has `make package`."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = """
import headway, sys
from headway.cli import main
from headway.plan.machine.hardware import node_names
from headway.watch.web import assets
from headway.demo import tour
print(headway.__file__, len(node_names()) > 5, sorted(path.name for path in tour.scripts()))
raise SystemExit(main(["--version"]))
"""
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path}/site/headway/__init__.py True ['draw.py', 'train.py']",
        f"headway {headway.__version__}",
    ]


def test_every_extra_is_in_all_and_tried_in_an_environment_of_its_own() -> None:
    extras = PROJECT["optional-dependencies"]
    others = set(extras) - {"all", "dev", "docs"}
    (line,) = extras["all"]
    assert set(line.removeprefix("headway[").removesuffix("]").split(",")) == others
    script = (ROOT / "scripts" / "check_package.py").read_text()
    assert set(re.findall(r'^    "(\w+)": "', script.partition("NEEDED")[0], re.MULTILINE)) == others


# --- what comes with it


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys(), "what the format requires"
    assert (cited["version"], cited["license"]) == (headway.__version__, PROJECT["license"])


def test_release_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    release_notes = import_module("release_notes")
    text = "# Changelog\n\n## Unreleased\n\n- c\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- b\n\n## 0.1.0\n\n- a\n"
    found = {version: release_notes.read_notes(text, version) for version in ("Unreleased", "0.2.0", "0.1.0")}
    assert found == {"Unreleased": "- c\n", "0.2.0": "### Added\n\n- b\n", "0.1.0": "- a\n"}
    with pytest.raises(SystemExit, match=r"no section '0.3.0'; it has Unreleased, 0.2.0, 0.1.0"):
        release_notes.read_notes(text, "0.3.0")
    assert release_notes.read_notes((ROOT / "CHANGELOG.md").read_text(), "Unreleased").startswith("### Added")


INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
SECTIONS = {"%arguments", "%files", "%post", "%environment", "%runscript", "%test"}


def test_recipes_say_what_exists() -> None:
    docker = (RECIPES / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split()[0] for line in docker.splitlines() if line and not line.startswith("#")]
    assert set(steps) == INSTRUCTIONS and steps.count("FROM") == 2
    apptainer = (RECIPES / "headway.def").read_text()
    assert set(re.findall(r"^%\w+", apptainer, re.MULTILINE)) == SECTIONS
    assert f"WHEEL=dist/headway-{headway.__version__}-py3-none-any.whl" in apptainer
    torch = re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for text in (docker, apptainer):
        assert torch and f"TORCH={torch[0]}\n" in text
        (extras,) = re.findall(r"EXTRAS=(\S+)", text)
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    packages = [re.findall(r"--no-install-recommends ([\w+ -]+\w)", text)[0] for text in (docker, apptainer)]
    assert packages[0] == packages[1]


@pytest.mark.parametrize(
    ("recipe", "image"), [("pyxis.sbatch", "headway.sqsh"), ("apptainer.sbatch", "headway.sif")]
)
def test_job_scripts_of_recipes(recipe: str, image: str, tmp_path: Path) -> None:
    """Run by bash with srun and scontrol replaced, which cannot run here: a stop with a checkpoint is queued again."""
    for name in ("srun", "scontrol"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@"; echo\n[ {name} = scontrol ] || exit $CODE\n')
        tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    for code, requeued in ((75, True), (0, False), (1, False)):
        command = ["bash", RECIPES / recipe, "train.py", "--name", "a b"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ | {"CODE": str(code)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (code, "")
        srun, *rest = done.stdout.splitlines()
        assert f"{tmp_path}/{image}|" in srun
        assert srun.endswith("|headway|agent|--nproc|4|train.py|--name|a b|")
        assert rest == (["scontrol|requeue|7|"] if requeued else [])
