"""Public names: listed once, loaded on first use, then cached, and never overwritten by a module."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
LAZY = [path for path in PACKAGES if "lazy.exports(" in (path / "__init__.py").read_text()]


def dotted(path: Path) -> str:
    return ".".join(("headway", *path.relative_to(SOURCE).parts))


def imported_names(package: Path) -> dict[str, str]:
    """The names that a package's `__init__.py` imports, with the module that each one comes from."""
    tree = ast.parse((package / "__init__.py").read_text())
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    return {
        alias.asname or alias.name: str(node.module)
        for block in blocks
        for node in block
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small lazy package whose module counts how often it is asked for a name."""
    root = tmp_path / "lazy_sample"
    root.mkdir()
    (root / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from headway import lazy\n"
        "if TYPE_CHECKING:\n"
        "    from lazy_sample import tools as tools\n"
        "    from lazy_sample.things import one as one, two as deux\n"
        "__getattr__, __dir__, __all__ = lazy.exports(__name__)\n"
    )
    (root / "tools.py").write_text("")
    (root / "things.py").write_text(
        "asked = []\n"
        "def __getattr__(name):\n"
        "    if name not in ('one', 'two'):\n"
        "        raise AttributeError(name)\n"
        "    asked.append(name)\n"
        "    return name.upper()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_sample", "lazy_sample.tools", "lazy_sample.things"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "lazy_sample"


def test_names_are_loaded_on_first_use_and_cached(package: str) -> None:
    sample = importlib.import_module(package)
    assert "lazy_sample.things" not in sys.modules
    assert sample.one == "ONE" and sample.one == "ONE" and sample.deux == "TWO"
    asked = sys.modules["lazy_sample.things"].asked
    first = len(asked)
    assert vars(sample)["one"] == "ONE"
    assert sample.one == "ONE" and len(asked) == first, "the second use costs nothing"
    assert sample.tools is sys.modules["lazy_sample.tools"]


def test_the_lists_agree(package: str) -> None:
    sample = importlib.import_module(package)
    assert sample.__all__ == dir(sample) == ["deux", "one", "tools"]
    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'three'"):
        _ = sample.three


@pytest.mark.parametrize("path", LAZY, ids=dotted)
def test_every_public_name_exists_and_is_cached(path: Path) -> None:
    module = importlib.import_module(dotted(path))
    assert module.__all__ == sorted(imported_names(path).keys() - {"annotations", "TYPE_CHECKING", "lazy"})
    for name in module.__all__:
        assert getattr(module, name) is vars(module)[name]


def test_a_module_never_has_the_name_of_a_public_function_or_class() -> None:
    """Importing `package.name` sets the attribute `name` of the package, whatever it was before."""
    clashes = []
    for package in PACKAGES:
        modules = {path.stem for path in package.glob("*.py")} | {
            path.parent.name for path in package.glob("*/__init__.py")
        }
        for name, origin in imported_names(package).items():
            if name in modules and origin != dotted(package):
                clashes.append(f"{dotted(package)}.{name} is imported from {origin} and is a module, too")
    assert not clashes, "\n".join(clashes)


def test_importing_headway_imports_no_torch() -> None:
    code = "import headway, sys; print('torch' in sys.modules, len(headway.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
