"""The house rules, guarded: what is collected, what names mean, and what a reader can follow."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import headway

ROOT = Path(__file__).parents[1]
PACKAGE = Path(headway.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# --- the suite runs everything


def test_every_test_file_is_collected(collected_files: set[Path]) -> None:
    on_disk = {path for path in (ROOT / "tests").rglob("test_*.py") if "__pycache__" not in path.parts}
    assert sorted(str(path.relative_to(ROOT)) for path in on_disk - collected_files) == []


def test_every_file_is_linted() -> None:
    """Ruff's default leaves out directories called dist or build, as pytest's does."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "src", "tests"]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    on_disk = {path for top in ("src", "tests") for path in (ROOT / top).rglob("*.py")}
    assert sorted(str(path.relative_to(ROOT)) for path in on_disk - set(map(Path, seen))) == []


# --- one name, one meaning


def test_names_of_classes_and_types_mean_one_thing() -> None:
    """Two packages that may not import each other may write the same alias, such as that of an array of bytes."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for path in MODULES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                name, meaning = node.name, f"class in {name_of(path)}"
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name, meaning = ast.unparse(target), ast.unparse(node.value)
            else:
                continue
            if re.fullmatch(r"[A-Z][a-z]\w*", name):
                meanings.setdefault(name, {}).setdefault(meaning, []).append(name_of(path))
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def public_names(package: Path) -> set[str]:
    """The names under `if TYPE_CHECKING:` of a package, which are its public ones."""
    return {
        alias.asname or alias.name
        for node in tree(package / "__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_no_submodule_overwrites_a_public_name_of_its_package() -> None:
    """Importing headway.checkpoint.save would set the attribute `save` of headway.checkpoint to a module."""
    clashes = []
    for package in PACKAGES:
        submodules = {path.stem for path in package.glob("*.py")}
        submodules |= {path.parent.name for path in package.glob("*/__init__.py")}
        dotted = ".".join(("headway", *package.relative_to(PACKAGE).parts))
        for name in sorted(public_names(package) & submodules):
            if getattr(import_module(dotted), name) is not import_module(f"{dotted}.{name}"):
                clashes.append(f"{dotted}.{name}")
    assert clashes == []


def test_a_sub_package_exports_what_somebody_imports_from_it() -> None:
    """A second list of names that nobody reads is dead code. Those of `headway` and its packages are the users'."""
    imports = re.compile(r"from (headway(?:\.\w+){2,}) import (\([^)]*\)|[^\n]*)")
    places = [
        path for top in ("src", "tests", "benchmarks", "examples", "docs") for path in (ROOT / top).rglob("*")
    ]
    used: set[str] = set()
    for path in places:
        if path.suffix in (".py", ".md"):
            for module, names in imports.findall(path.read_text()):
                used |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    exported = {
        ".".join(("headway", *package.relative_to(PACKAGE).parts, name))
        for package in PACKAGES
        if len(package.relative_to(PACKAGE).parts) > 1
        for name in public_names(package)
    }
    assert sorted(exported - used) == []


# --- processes


def test_modules_start_by_one_function() -> None:
    """By `-m` alone, a process would import from the current directory, where other users may have put a module."""
    started = re.compile(r'"-m", (?:"headway[\w.]*"|__name__)')
    found = {name_of(path): started.findall(path.read_text()) for path in MODULES}
    # the ranks of this one run in a directory of their own
    expected = {"doctor/probes.py": ['"-m", "headway.doctor.canary"']}
    assert {name: starts for name, starts in found.items() if starts} == expected


# --- nothing grows out of a reader's sight


def test_functions_fit_a_screen() -> None:
    too_long = []
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    too_long.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert too_long == []


# --- words

BRITISH = re.compile(
    r"\b\w*(optimis|colour|behaviour|neighbour|normalis|initialis|synchronis|serialis|recognis|utilis|summaris"
    r"|organis|minimis|maximis|finalis|catalogue)\w*",
    re.IGNORECASE,
)
HOUSE = re.compile(r"\bfolders?\b", re.IGNORECASE)  # the word is: directory
FOREIGN = re.compile(  # names of others
    r"ImageFolder|DatasetFolder|initialise_process_group|optimiser_to\(optimiser|folder=|\(folder, job_id"
)


def texts() -> Iterator[Path]:
    yield from MODULES
    yield from ROOT.glob("*.md")
    for place in ("docs", "examples", "benchmarks"):
        yield from (path for path in (ROOT / place).rglob("*") if path.suffix in (".md", ".py"))


def test_spelling_is_american_and_a_directory_is_a_directory() -> None:
    found = []
    for path in texts():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in (*BRITISH.finditer(FOREIGN.sub("", line)), *HOUSE.finditer(FOREIGN.sub("", line))):
                found.append(f"{path.relative_to(ROOT)}:{number}: {word[0]}")
    assert found == [], f"{len(found)} words"


CONFTEST = """
import groups, pytest
def pytest_configure(): groups.name_file()
def pytest_unconfigure(): groups.remove_file()
def pytest_collection_finish(session): groups.publish(session.items)
def pytest_xdist_make_scheduler(config, log): return groups.GroupScheduling(config, log)
@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    with groups.worker_at_work(): return (yield)
def pytest_runtest_setup(item):
    if item.get_closest_marker('alone'): groups.wait_for_other_workers()
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A directory for tests that workers of pytest-xdist share out as they share out ours."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    return tmp_path / "tests"


def run_suite(suite: Path, *, workers: int) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT / "tests" / "helpers"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = f"-p xdist -n {workers} --no-loadscope-reorder -q -p no:cacheprovider tests"
    command = [sys.executable, "-m", "pytest", *options.split()]
    return subprocess.run(command, cwd=suite.parent, env=environment, capture_output=True, text=True)


def test_workers_share_no_fixture_and_end_before_tests_that_are_marked_alone(suite: Path) -> None:
    """What is costly to set up, such as a SLURM cluster, must not be set up by each worker."""
    for name in ("a", "b", "c"):
        (suite / f"test_{name}.py").write_text(
            "import os, pathlib, time, pytest\n"
            "@pytest.fixture(scope='module')\n"
            "def costly(): pathlib.Path(__file__ + os.environ['PYTEST_XDIST_WORKER']).touch()\n"
            "@pytest.mark.parametrize('number', range(4))\n"
            "def test_it(costly, number): time.sleep(0.05)\n"
            "def test_others_run(): time.sleep(0.5); pathlib.Path(__file__ + 'done').touch()\n"
        )
    (suite / "test_z.py").write_text(
        "import pathlib, pytest\n"
        "@pytest.mark.alone\n"
        "@pytest.mark.parametrize('number', range(2))\n"
        "def test_last(number): assert len(list(pathlib.Path(__file__).parent.glob('*done'))) == 3\n"
    )
    done = run_suite(suite, workers=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(suite.glob("*.pygw*"))) == 3
