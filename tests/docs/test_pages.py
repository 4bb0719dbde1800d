"""Every page: links lead somewhere, examples are Python, commands exist."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

import headway
from headway.cli import VERBS, main

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("tests/*/README.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


each_page = each(PAGES)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The command lines of headway that a page shows, or that an example begins with, without `headway`."""
    if page.suffix == ".py":
        shown = [ast.get_docstring(ast.parse(page.read_text())) or ""]
    else:
        shown = blocks(page, "bash") + blocks(page, "console")
    lines = "\n".join(shown).replace("\\\n", " ")
    return re.findall(r"^ *(?:\$ )?(?:HEADWAY_\w+=\S+ )?headway (.+?)(?: +#.*)?$", lines, re.MULTILINE)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            led = page.parent / path if path else page
            assert led.exists(), target
            assert not heading or heading in headings(led), target


def headings(page: Path) -> set[str]:
    """What links call the headings of a page."""
    words = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words}


@each_page
def test_lines_of_text_are_short(page: Path) -> None:
    """Tables and blocks excepted: differences of pages can be read in a terminal."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@each_page
def test_python_examples_parse_and_use_names_that_exist(page: Path) -> None:
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hw":
                assert node.attr in headway.__all__, f"hw.{node.attr}"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(
        re.findall(
            r"\b(?:tests|benchmarks|examples|scripts|docs)/[\w/.-]+\.(?:py|sh|md|yaml)\b", page.read_text()
        )
    )
    if page.name != "CHANGELOG.md":  # it tells of files that were moved later
        assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@each_page
def test_commands_exist(page: Path) -> None:
    for code in blocks(page, "bash"):
        for verb in re.findall(r"^headway ([a-z][a-z-]*)", code, re.MULTILINE):
            assert verb in VERBS, f"headway {verb}"


def test_every_variable_is_on_the_reference_page() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [
        name for name in set(re.findall(r"\bHEADWAY_[A-Z_]+\b", code)) if f"`{name}`" not in reference
    ] == []


@each(PAGES + EXAMPLES)
def test_options_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(page):
        words = line.split()
        ends = (number for number, word in enumerate(words) if word.endswith(".py") or word == "--")
        script = next(ends, len(words))
        wanted = {word.partition("=")[0] for word in words[:script] if word.startswith("--")}
        if wanted:
            assert wanted - options_of(words, capsys) == set(), f"headway {line}"


@each([page for page in PAGES + EXAMPLES if any(line.startswith("submit ") for line in commands(page))])
def test_jobs_can_be_submitted_as_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.py", *(str(path.relative_to(ROOT)) for path in EXAMPLES)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "cluster.yaml").write_text("kind: slurm\n")
    (tmp_path / "sweep.yaml").write_text("lr: [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        verb, *words = shlex.split(line.replace("$PWD", str(tmp_path)))
        if verb == "submit":
            trial = ["--dry-run", *(word for word in words if word not in ("--dry-run", "--watch"))]
            assert main([verb, *trial]) == 0, f"headway {line}: {capsys.readouterr().err}"


def options_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options of the verb, and of its own verb if it has one, that a command line begins with."""
    for depth in (2, 1):
        with suppress(SystemExit):  # so argparse ends
            if main([*words[:depth], "--help"]):
                continue
        return set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    raise AssertionError(f"no help for {words}")


def defined_in(path: Path) -> set[str]:
    """Functions, classes and methods of a module: `train`, `Pipeline`, `Pipeline.run`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_the_walks_of_the_architecture_lead_through_code_that_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = Path(headway.__file__).parent
    steps = re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", page)  # some go over the end of a line
    assert len(steps) > 40
    missing = [
        f"{file}: {name}"
        for file, name in steps
        if not (package / file).is_file() or name not in defined_in(package / file)
    ]
    assert missing == []


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page, re.MULTILINE))
    package = Path(headway.__file__).parent
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert packages - rows.keys() == set()
    for name in packages:
        inside = {path.parent.name for path in package.glob(f"{name}/*/__init__.py")}
        assert {each for each in inside if f"`{each}/`" not in rows[name]} == set(), name


def test_every_test_that_the_security_page_names_exists() -> None:
    """A row of its table without a test is a promise that nothing holds."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    assert len(rows) >= 14 and all("`tests/" in row.split("|")[-2] for row in rows)
    named = set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", text))
    for name in sorted(named):
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert not test or f"def {test}(" in (ROOT / file).read_text(), name
