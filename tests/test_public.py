"""Taste, guarded: the public names, what importing costs, and how large things may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import headway

PACKAGE = Path(headway.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has imported after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_public_names_are_sorted_and_there() -> None:
    assert headway.__all__ == sorted(headway.__all__)
    for name in headway.__all__:
        assert getattr(headway, name) is not None
    rooms = [name for name in headway.__all__ if isinstance(getattr(headway, name), ModuleType)]
    assert len(headway.__all__) - len(rooms) <= 32, "what users must remember, beside the rooms"


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(headway.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = headway.nope


def test_importing_headway_imports_next_to_nothing() -> None:
    before = modules_after("")
    new = {name.split(".")[0] for name in modules_after("import headway") - before}
    assert new <= {
        "headway",
        "importlib",
        "typing",
        "warnings",
        "contextlib",
        "collections",
        "functools",
        "re",
    } | set(sys.stdlib_module_names)
    assert len(modules_after("import headway") - before) < 40


@pytest.mark.parametrize(
    "statement",
    [
        "from headway.cli import main; main(['--help'])",
        "from headway.cli import main; main(['--version'])",
        "import headway.cli.run, headway.cli.doctor",
        "import headway.run, headway.run.lock, headway.run.plain, headway.run.source",
        "import headway.system.redact, headway.dist.failure.record, headway.dist.failure.heartbeat",
        "import headway.launcher.agent.agent, headway.plan, headway.watch, headway.errors, headway.system.failpoints",
        "import headway.launcher.functions.call, headway.launcher.job, headway.run.status, headway.launcher.sweep",
        "import headway.testing.plugin",
    ],
)
def test_rooms_that_must_answer_at_once_do_not_import_torch(statement: str) -> None:
    assert not {"torch", "numpy"} & modules_after(statement)


def test_help_imports_few_modules() -> None:
    before = modules_after("")
    count = len(modules_after("from headway.cli import main; main(['--help'])") - before)
    assert count < 60, f"{count} modules for a page of help"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "a module is read in one sitting: give it a second room"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} does not fit a screen"


EXECUTING = {
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "marshal.loads",
    "eval",
    "exec",
    "os.system",
    "yaml.unsafe_load",
}


# pytest's process and its workers are one program, and tests are code: there, pickle is in order
# a launched function travels as pickle, through files of its user's own, next to the code that the same job runs
PARCELS = PACKAGE / "launcher" / "parcel.py"
READERS = [path for path in MODULES if "testing" not in path.relative_to(PACKAGE).parts and path != PARCELS]


def test_parcels_are_opened_in_one_place_and_by_jobs_only() -> None:
    users = {path.relative_to(PACKAGE).as_posix() for path in MODULES if "parcel.unpack(" in path.read_text()}
    assert users == {"launcher/job.py", "launcher/worker.py"}
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(PARCELS.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert [call for call in calls if call in EXECUTING] == ["pickle.loads"]


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_reads_can_execute(path: Path) -> None:
    """pickle, eval and a shell have no place where files, stores and names of others are read."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in EXECUTING, ast.unparse(node)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("shell") != "True", ast.unparse(node)
            assert ast.unparse(node.func) != "yaml.load" or "Loader" in given, ast.unparse(node)
