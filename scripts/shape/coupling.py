"""Which attributes of a class other modules use, by the types that mypy infers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mypy import build
from mypy.main import process_options
from mypy.nodes import Expression, MemberExpr, MypyFile, Node, TypeInfo
from mypy.types import CallableType, Instance, Type, TypeType, TypeVarType, UnionType, get_proper_type

_OTHERS = frozenset(
    ("node", "info", "var", "names", "expanded")
)  # what a node refers to, rather than contains


@dataclass
class UsedClass:
    name: str
    attributes: Counter[str] = field(default_factory=Counter)
    users: set[str] = field(default_factory=set)

    @property
    def modules(self) -> int:
        return len(self.users)


def used_classes(root: Path) -> list[UsedClass]:
    """Returns the package's classes, the one with most attributes used by other modules first.

    Private attributes count as much as public ones; the fields of records count, too.
    """
    os.environ["MYPYPATH"] = str(root / "src")
    # the types of other packages are left out: they take a minute, and are not asked for
    sources, options = process_options(
        ["-p", "headway", "--follow-imports", "skip", "--ignore-missing-imports"]
    )
    options.export_types, options.preserve_asts, options.incremental = True, True, False
    result = build.build(sources, options)
    found: dict[str, UsedClass] = {}
    for name, module in result.files.items():
        if name.startswith("headway"):
            for member in _members(module):
                for owner in _owners(member, result.types):
                    if owner.module_name.startswith("headway") and owner.module_name != name:
                        used = found.setdefault(owner.fullname, UsedClass(owner.name))
                        used.attributes[member.name] += 1
                        used.users.add(name)
    return sorted(found.values(), key=lambda used: len(used.attributes), reverse=True)


def _members(module: MypyFile) -> Iterator[MemberExpr]:
    """Yields the attribute accesses of a module. mypy is compiled, and its visitors cannot be subclassed."""
    seen: set[int] = set()
    waiting: list[object] = [*module.defs]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Node) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, MemberExpr):
                yield item
            attributes = {
                name for base in type(item).__mro__ for name in getattr(base, "__mypyc_attrs__", ())
            }
            waiting += (getattr(item, name, None) for name in attributes - _OTHERS)


def _owners(member: MemberExpr, types: dict[Expression, Type]) -> Iterator[TypeInfo]:
    """Yields the classes that define an attribute that is accessed."""
    for info in _classes(types.get(member.expr)):
        yield next((base for base in info.mro if member.name in base.names), info)


def _classes(type_: Type | None) -> list[TypeInfo]:
    if type_ is None:
        return []
    proper = get_proper_type(type_)
    match proper:
        case Instance():
            return [proper.type]
        case UnionType():
            return [info for item in proper.items for info in _classes(item)]
        case TypeVarType():
            return _classes(proper.upper_bound)
        case TypeType():
            return _classes(proper.item)
        case CallableType() if proper.is_type_obj():
            return _classes(proper.ret_type)
    return []
