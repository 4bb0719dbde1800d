"""Every page: links lead somewhere, examples are Python, commands exist."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path

import pytest

import headway
from headway.cli import VERBS, main

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("tests/*/README.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@each_page
def test_python_examples_parse_and_use_names_that_exist(page: Path) -> None:
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hw":
                assert node.attr in headway.__all__, f"hw.{node.attr}"


@each_page
def test_commands_exist(page: Path) -> None:
    for code in blocks(page, "bash"):
        for verb in re.findall(r"^headway ([a-z][a-z-]*)", code, re.MULTILINE):
            assert verb in VERBS, f"headway {verb}"


def test_every_page_of_the_documentation_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f"(docs/{page.name})" in readme, page.name


def test_every_variable_is_on_the_reference_page() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [
        name for name in set(re.findall(r"\bHEADWAY_[A-Z_]+\b", code)) if f"`{name}`" not in reference
    ] == []


@each_page
def test_options_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks(page, "bash") + blocks(page, "console"):
        for line in re.findall(r"^(?:\$ )?headway (.+?)(?: +#.*)?$", code.replace("\\\n", " "), re.MULTILINE):
            words = line.split()
            script = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
            wanted = {word.partition("=")[0] for word in words[:script] if word.startswith("--")}
            if wanted:
                assert wanted - options_of(words, capsys) == set(), f"headway {line}"


def options_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options of the verb, and of its own verb if it has one, that a command line begins with."""
    for depth in (2, 1):
        with suppress(SystemExit):  # so argparse and tyro end
            if main([*words[:depth], "--help"]):
                continue
        return set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    raise AssertionError(f"no help for {words}")
