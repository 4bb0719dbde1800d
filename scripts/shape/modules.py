"""Modules, their sizes and imports, and what tests touch, read from the source."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

Modules = dict[str, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_modules(package: Path) -> Modules:
    """Returns the syntax tree of each module, by dotted name."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): ast.parse(
            path.read_text()
        )
        for path in sorted(package.rglob("*.py"))
    }


def sizes(modules: Modules) -> tuple[int, tuple[int, int, int]]:
    """Returns the lines of all modules; and of functions the median, the 95th percentile and the longest."""
    lines = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    )
    total = sum(max((node.end_lineno or 0 for node in tree.body), default=0) for tree in modules.values())
    return total, (int(statistics.median(lines)), lines[int(0.95 * len(lines))], lines[-1])


def import_cycles(modules: Modules) -> list[list[str]]:
    """Returns the groups of modules that import each other, imports for types included, the largest first.

    The lists of exports in `__init__.py` are no imports: they are loaded by name, on first use.
    """
    imports = {
        name: {target for target in imported(tree, modules) if target != name}
        for name, tree in modules.items()
        if not name.endswith(".__init__")
    }
    return sorted((group for group in connected(imports) if len(group) > 1), key=len, reverse=True)


def imported(tree: ast.Module, modules: Modules) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else node.module


def connected(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yields the strongly connected groups of a graph: each node reaches every other one of its group."""
    reach = {name: reachable(name, graph) for name in graph}
    left = set(graph)
    while left:
        name = left.pop()
        group = [name, *(other for other in reach[name] & left if name in reach[other])]
        left.difference_update(group)
        yield group


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph.get(waiting.pop(), set()) - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def share_of_private_tests(tests: Path) -> float:
    """Returns the share of test functions that use a private name of headway or replace an attribute,
    themselves or through a helper or fixture of their file."""
    total = private = 0
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        defined = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
        helpers = {
            name for name, node in defined.items() if not name.startswith("test_") and is_private(node)
        }
        for name, node in defined.items():
            if name.startswith("test_") and isinstance(node, Function):
                used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} | {
                    x.arg for x in node.args.args
                }
                total += 1
                private += is_private(node) or bool(used & helpers)
    return private / total


def is_private(node: ast.AST) -> bool:
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and re.match(r"_[a-zA-Z]", x.id):
            return True
        if isinstance(x, ast.Attribute):
            own = isinstance(x.value, ast.Name) and x.value.id in ("self", "cls")
            if re.match(r"_[a-zA-Z]", x.attr) and not own:
                return True
            if x.attr == "setattr" and ast.unparse(x.value) == "monkeypatch":
                return True
    return False


def count_words(docs: Path) -> int:
    return sum(len(path.read_text().split()) for path in docs.rglob("*.md"))
