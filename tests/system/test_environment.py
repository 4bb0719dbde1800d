from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import headway
from headway.errors import UsageError
from headway.system import environment

SOURCE = Path(headway.__file__).parent
NAMES = {value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)}


def test_every_variable_is_listed_once() -> None:
    used = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"HEADWAY_[A-Z_]*[A-Z]", path.read_text())
    }
    assert used == NAMES


def test_names_are_written_out_in_one_module() -> None:
    literals = [
        f"{path.relative_to(SOURCE)}: {node.value}"
        for path in SOURCE.rglob("*.py")
        if path != Path(environment.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]
    assert not literals, "use the constants of headway.system.environment"


def test_every_variable_has_a_description() -> None:
    text = Path(environment.__file__).read_text()
    for name in NAMES:
        assert re.search(rf'= "{name}"\n"""[^"]+"""\n', text), f"{name} has no description"


def test_the_reference_lists_every_variable() -> None:
    page = SOURCE.parents[1] / "docs" / "reference.md"
    assert set(re.findall(r"HEADWAY_[A-Z_]*[A-Z]", page.read_text())) >= NAMES


def test_values() -> None:
    environ = {"HEADWAY_RUNS": "~/runs", "HEADWAY_DATA": "", "HEADWAY_LEDGER": "0", "HEADWAY_WATCHDOG": "1e3"}
    assert environment.runs_root(environ) == Path.home() / "runs"
    assert environment.runs_root({}) == Path("runs")
    assert environment.directory(environment.DATA, environ) is None
    assert not environment.is_on(environment.LEDGER, environ)
    assert environment.watchdog_s(5.0, environ) == 1000 and environment.watchdog_s(5.0, {}) == 5


@pytest.mark.parametrize(
    ("text", "on"),
    [("1", True), ("true", True), ("Yes", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_switches_are_read_in_one_way(text: str, on: bool) -> None:
    for name in (environment.LEDGER, environment.FAKE_DATA, environment.SAVE_IN_BACKGROUND):
        for default in (False, True):
            assert environment.is_on(name, {name: text}, default=default) is on
            assert environment.is_on(name, {name: ""}, default=default) is default
            assert environment.is_on(name, {}, default=default) is default


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(UsageError, match="HEADWAY_LEDGER='maybe' is neither on nor off: give 1 or 0"):
        environment.is_on(environment.LEDGER, {"HEADWAY_LEDGER": "maybe"})


def test_no_other_module_decides_what_is_on() -> None:
    pattern = re.compile(r"environ(\.get\(|\[)environment\.(LEDGER|FAKE_DATA|SAVE_IN_BACKGROUND)\b")
    assert [str(path) for path in SOURCE.rglob("*.py") if pattern.search(path.read_text())] == []


@pytest.mark.parametrize("text", ["", "soon", "-1", "inf", "nan"])
def test_a_time_that_is_not_valid_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"HEADWAY_WATCHDOG=.* is not a valid time"):
        environment.watchdog_s(5.0, {"HEADWAY_WATCHDOG": text})
