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
_MOST_LAYERS = 10
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
        self._assigned_keys: dict[str, bool] = {}
        """of what has items assigned to it, whether that is always by constant keys"""
        layers = [layer for function in functions for layer in _layers(function)]
        for function in layers:
            self._read.update(default_arguments(function))
        for code in _codes(layers):
            self._note(code)

    def carry(self, name: str) -> bool:
        """Whether a value that is assigned to this name is read in a later step."""
        return name in self._carried or (name in self._assigned_after and name in self._read)

    def carry_items(self, name: str, *, all_new: bool) -> bool:
        """Whether a later step reads an item of this dict, rather than only items that it has assigned itself."""
        return self.carry(name) or not (all_new or self._assigned_keys.get(name, False))

    def read(self, name: str) -> bool:
        """Whether a container of this name is read, rather than only added to."""
        return name in self._read

    def _note(self, code: CodeType) -> None:
        first: dict[str, bool] = {}  # by name, whether the first access reads it
        before: dis.Instruction | None = None
        instructions = list(dis.get_instructions(code))
        for place, instruction in enumerate(instructions):
            kind, name = instruction.opname, str(instruction.argval)
            adds = kind.startswith(("LOAD_ATTR", "LOAD_METHOD")) and name in _ADDS
            if before is not None and not adds:
                self._read.add(str(before.argval))
            before = None
            reads, assigns = _access(instructions, place) if kind in _LOADS else (False, kind in _STORES)
            if kind in _LOADS:
                before = instruction
            if reads:
                first.setdefault(name, True)
            if assigns:
                if kind in _LOADS:
                    constant = instructions[place + 1].opname == "LOAD_CONST"
                    self._assigned_keys[name] = constant and self._assigned_keys.get(name, True)
                if code.co_name in _AFTER_STEPS:
                    self._assigned_after.add(name)
                if first.setdefault(name, False) and code.co_name not in _ONCE:
                    self._carried.add(name)


def default_arguments(function: FunctionType) -> dict[str, object]:
    """Returns the default arguments of a function, which keep what calls put into them.

    >>> default_arguments(lambda x, memo=[], *, start=1: None)
    {'memo': [], 'start': 1}
    """
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})


def _access(instructions: list[dis.Instruction], place: int) -> tuple[bool, bool]:
    """Returns whether what is loaded here is read, and whether an item of it is assigned, as in `it[key] = value`."""
    depth = 1  # of the stack, from what is loaded on
    for each in instructions[place + 1 :]:
        if each.opname == "STORE_SUBSCR":
            return depth != 2, depth == 2
        if each.opname == "COPY" and each.arg == depth:
            return True, depth == 2  # it[key] += value
        if depth < 1 or "JUMP" in each.opname or each.opname.startswith(("STORE", "RETURN")):
            break
        depth += dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None)
    return True, False


def _layers(function: FunctionType) -> Iterator[FunctionType]:
    """Yields a function and those that its decorators have wrapped: torch wraps `step` of each optimizer."""
    layer: object = function
    for _ in range(_MOST_LAYERS):
        if not isinstance(layer, FunctionType):
            return
        yield layer
        layer = vars(layer).get("__wrapped__")


def _codes(functions: Iterable[FunctionType]) -> Iterator[CodeType]:
    """Yields the code of functions and of those within them, each once."""
    seen, left = set[CodeType](), [function.__code__ for function in functions]
    while left:
        code = left.pop()
        if code not in seen:
            seen.add(code)
            yield code
            left.extend(each for each in code.co_consts if isinstance(each, CodeType))
