"""Taste, guarded: the public names, what importing costs, and how large things may grow."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import headway
import headway.cli

PACKAGE = Path(headway.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has imported after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_public_names_are_sorted_and_there() -> None:
    assert headway.__all__ == sorted(headway.__all__)
    for name in headway.__all__:
        assert getattr(headway, name) is not None
    packages = [name for name in headway.__all__ if isinstance(getattr(headway, name), ModuleType)]
    assert len(headway.__all__) - len(packages) <= 32, "what users must remember, beside the packages"


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
        "import headway.launcher.launch_function, headway.launcher.job, headway.run.status, headway.launcher.sweep",
        "import headway.testing.plugin",
    ],
)
def test_rooms_that_must_answer_at_once_do_not_import_torch(statement: str) -> None:
    assert not {"torch", "numpy"} & modules_after(statement)


def test_no_verb_imports_torch_before_it_must() -> None:
    verbs = [each.stem for each in Path(headway.cli.__path__[0]).glob("*.py") if each.stem != "__init__"]
    assert "torch" not in modules_after("; ".join(f"import headway.cli.{verb}" for verb in sorted(verbs)))


def test_help_imports_few_modules() -> None:
    before = modules_after("")
    count = len(modules_after("from headway.cli import main; main(['--help'])") - before)
    assert count < 60, f"{count} modules for a page of help"


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


# pytest's process and its workers are one program, and tests are code: there, pickle is in order.
# A launched function travels as pickle, through files of its user's own, next to the code that the same job runs.
PICKLES = PACKAGE / "launcher" / "functions" / "pickled.py"
# Objects that a user sends to another rank are pickles, too; their signature is checked before they are loaded.
OBJECTS = PACKAGE / "dist" / "objects.py"
READERS = [
    path
    for path in MODULES
    if "testing" not in path.relative_to(PACKAGE).parts and path not in (PICKLES, OBJECTS)
]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_pickles_are_read_in_one_module_and_by_jobs_only() -> None:
    module = f"headway.{'.'.join(PICKLES.relative_to(PACKAGE).with_suffix('').parts)}"
    parent, _, name = module.rpartition(".")
    imported = re.compile(rf"from {parent} import .*\b{name}\b|from {module} import|import {module}\b")
    users = {path.relative_to(PACKAGE).as_posix() for path in MODULES if imported.search(path.read_text())}
    assert users <= {
        "launcher/job.py",
        "launcher/functions/background.py",
        "launcher/functions/exceptions.py",
        "launcher/launch_function.py",
        "launcher/functions/worker.py",
    }
    found = [ast.unparse(call.func) for call in calls(PICKLES)]
    assert [call for call in found if call in EXECUTING] == ["pickle.loads"]
    loads = [ast.unparse(call) for call in calls(OBJECTS) if ast.unparse(call.func) in EXECUTING]
    assert len(loads) == 1 and loads[0].startswith("pickle.loads(verify(")
    collectives = [path for path in MODULES if re.search(r"c10d\.\w*object\w*\(", path.read_text())]
    assert collectives == [], "torch's object collectives load pickles that anybody may have sent"


def test_nothing_that_reads_can_execute() -> None:
    """pickle, eval and a shell have no place where files, stores and names of others are read.

    torch's own reader of weights executes nothing with `weights_only=True`.
    """
    offenders = []
    for path in READERS:
        for call in calls(path):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            function = ast.unparse(call.func)
            executes = function in EXECUTING or given.get("shell") == "True"
            if function == "torch.load" and given.get("weights_only") == "True":
                continue
            if executes or (function == "yaml.load" and "Loader" not in given):
                offenders.append(f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}")
    assert offenders == []
