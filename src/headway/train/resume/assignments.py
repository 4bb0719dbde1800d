"""Which variables and attributes code reads before it assigns them: those carry a value from one step to the next.

`self.calls += 1` carries a value; `self.logits = net(x)` does not, since each step assigns it before it is read. Read
from bytecode, in the order in which it was written.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import final

_ONCE = frozenset(
    {"__init__", "__repr__", "state_dict", "load_state_dict", "pre_run", "pre_stage", "pre_epoch"}
)
"""functions that assign initial values, or that no step calls"""
_AFTER_STEPS = frozenset({"post_epoch", "post_stage", "log_point"})
"""hooks whose values are for the steps that follow"""
_ADDS = frozenset({"append", "extend", "add", "appendleft"})
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")


@final
class Assignments:
    """What the functions of a program read and assign, by name."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._carried = set[str]()
        """names that one function reads first and then assigns"""
        self._read = set[str]()
        """names that are read, other than to add to a list"""
        self._assigned_after = set[str]()
        for code in _codes(functions):
            self._note(code)

    def carry(self, name: str) -> bool:
        """Whether a value that is assigned to this name is read in a later step."""
        return name in self._carried or (name in self._assigned_after and name in self._read)

    def read(self, name: str) -> bool:
        """Whether a container of this name is read, rather than only added to."""
        return name in self._read

    def _note(self, code: CodeType) -> None:
        first: dict[str, bool] = {}  # by name, whether the first access reads it
        before: dis.Instruction | None = None
        for instruction in dis.get_instructions(code):
            kind, name = instruction.opname, str(instruction.argval)
            adds = kind.startswith(("LOAD_ATTR", "LOAD_METHOD")) and name in _ADDS
            if before is not None and not adds:
                self._read.add(str(before.argval))
            before = None
            if kind in _LOADS:
                first.setdefault(name, True)
                before = instruction
            elif kind in _STORES:
                if code.co_name in _AFTER_STEPS:
                    self._assigned_after.add(name)
                if first.setdefault(name, False) and code.co_name not in _ONCE:
                    self._carried.add(name)


def _codes(functions: Iterable[FunctionType]) -> Iterator[CodeType]:
    """Yields the code of functions and of those within them, each once."""
    seen, left = set[CodeType](), [function.__code__ for function in functions]
    while left:
        code = left.pop()
        if code not in seen:
            seen.add(code)
            yield code
            left.extend(each for each in code.co_consts if isinstance(each, CodeType))
