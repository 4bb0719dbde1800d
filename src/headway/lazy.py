"""Lazy exports: public names are imported on first use, so that importing a package does no work (PEP 562).

A package lists its public names once, in the import block that type checkers read:

    if TYPE_CHECKING:
        from headway.dist.group import World as World, world as world

    __getattr__, __dir__, __all__ = lazy.exports(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import SourceFileLoader
from typing import Any

Exports = tuple[Callable[[str], object], Callable[[], list[str]], list[str]]


def exports(package: str) -> Exports:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, read from its `if TYPE_CHECKING:` block.

    A name is imported on its first use and then kept in the package, so later uses cost nothing.
    """
    origins = dict(_imported_names(_source(package)))

    def load(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = origins[name]
        if module == package:  # a submodule: getattr on the package would call this function again
            value: object = import_module(f"{package}.{attribute}")
        else:
            value = getattr(__import__(module, fromlist=(attribute,)), attribute)
        vars(sys.modules[package])[name] = value
        return value

    names = sorted(origins)
    return load, lambda: [*names], names


def _source(package: str) -> str:
    spec = sys.modules[package].__spec__
    loader: Any = spec and spec.loader
    if spec and spec.origin and not hasattr(loader, "get_source"):  # pytest has its own loader for plugins
        loader = SourceFileLoader(package, spec.origin)
    source = loader.get_source(package) if loader else None
    if source is None:
        raise ImportError(f"{package} was installed without its source, which lists its public names")
    return str(source)


def _imported_names(source: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (public name, (module, name there)) for each import of the `if TYPE_CHECKING:` block."""
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        yield alias.asname or alias.name, (node.module, alias.name)
