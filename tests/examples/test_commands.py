"""What the examples show is there: scripts, their options, a command for SLURM, and public names only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))


def shown(page: Path) -> str:
    return ast.get_docstring(ast.parse(page.read_text())) or "" if page.suffix == ".py" else page.read_text()


def shown_commands() -> Iterator[tuple[str, Path, list[str]]]:
    """Yields each command that the examples show: what starts the script, the script, and its words."""
    for page in [*SCRIPTS, *EXAMPLES.rglob("README.md")]:
        text = shown(page).replace("\\\n", " ")
        for line in re.findall(r"^ *((?:HEADWAY_\w+=\S+ )?(?:headway|python) .*)$", text, re.MULTILINE):
            words = line.partition("  #")[0].split()
            place = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
            if place is not None:
                yield " ".join(words[:place]), ROOT / words[place], words[place + 1 :]


def options(script: Path) -> set[str]:
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "parser.add_argument"
        and isinstance(node.args[0], ast.Constant)
    }


def test_commands_name_scripts_and_options_that_exist() -> None:
    commands = list(shown_commands())
    assert len(commands) > 25
    for _, script, words in commands:
        assert script.is_file(), script
        assert {word for word in words if word.startswith("--")} <= options(script), script


def test_every_example_shows_how_to_submit_it() -> None:
    submitted = {script for start, script, _ in shown_commands() if start.startswith("headway submit")}
    trains = {script for script in SCRIPTS if "import headway" in script.read_text()}
    prepares = {"prepare.py", "make_photos.py", "make_tiny.py"}
    assert {script for script in trains if script.name not in prepares} <= submitted


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_use_public_names_only(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headway")), (
            "one import: headway as hw"
        )
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.startswith("__"), ast.unparse(node)
            if (path := ast.unparse(node)).startswith("hw."):
                found: object = headway
                for name in path.split(".")[1:]:
                    found = getattr(found, name)


def test_quickstart_has_forty_lines() -> None:
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) == 40
