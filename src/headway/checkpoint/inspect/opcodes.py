"""Pickles read as data: nothing in them is imported, called or built.

A pickle is a program for a small stack machine. Here its instructions, decoded by the standard library's `pickletools`,
move plain values, names and `PickledObject`s. An instruction that would call a function makes a `PickledObject` that
records the call. torch's `weights_only=True` cannot replace this: it builds objects, refuses files with other classes
instead of listing them, and needs torch.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, final

from headway.checkpoint.format.directory import DamagedCheckpoint


class PickledName(NamedTuple):
    """Something that the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@final
@dataclass(eq=False, repr=False)
class PickledObject:
    """An object that the pickle would build: by calling `what` with `args`, and then adding to it.

    It may contain itself a million times, so it is never compared or printed as a whole.
    """

    what: object
    args: object = ()
    pairs: list[tuple[object, object]] = field(default_factory=list)
    parts: list[object] = field(default_factory=list)
    state: object = None


DICT, LIST, SET = (
    PickledName("builtins", "dict"),
    PickledName("builtins", "list"),
    PickledName("builtins", "set"),
)
PERSISTENT = PickledName("pickle", "persistent_load")


@final
@dataclass(frozen=True)
class PickleContents:
    """One pickle: the value that it describes, and the names that loading it would import."""

    value: object
    names: frozenset[PickledName]


def read(stream: BinaryIO, name: str) -> PickleContents:
    """Reads one pickle and stops behind it; `DamagedCheckpoint` if there is none. `name` is for the message."""
    machine = _PickleMachine()
    try:
        for instruction, argument, _ in pickletools.genops(stream):
            machine.do(instruction.name, argument)
        return PickleContents(machine.stack.pop(), frozenset(machine.names))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise DamagedCheckpoint(f"{name}: it is not a readable pickle: {error}") from error


_PUSH = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SKIP = frozenset(("PROTO", "FRAME", "STOP"))


@final
class _PickleMachine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.names: set[PickledName] = set()
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        if name in _PUSH:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name not in _SKIP:
            if name not in _DO:
                raise ValueError(f"unknown instruction {name}")
            _DO[name](self, argument)

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the stack is too short")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def since_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self._marks.pop())

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def top(self) -> PickledObject:
        """Returns what is added to: a container, or an object that would be built."""
        found = self.stack[-1]
        return (
            found if isinstance(found, PickledObject) else PickledObject(found)
        )  # what is added to a plain value is dropped

    def add(self, parts: list[Any]) -> None:
        self.top().parts.extend(parts)

    def remember(self, key: int | None) -> None:
        self._memo[len(self._memo) if key is None else int(key)] = self.stack[-1]

    def recall(self, key: int) -> None:
        self.push(self._memo[int(key)])

    def name(self, module: object, name: object) -> PickledName:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("it imports something that is not a name")
        found = PickledName(module, name)
        self.names.add(found)
        return found


def _add_pairs(machine: _PickleMachine, flat: list[Any]) -> None:
    machine.top().pairs.extend(zip(flat[::2], flat[1::2], strict=True))


def _make_dict(machine: _PickleMachine) -> None:
    flat = machine.since_mark()
    machine.push(PickledObject(DICT, pairs=list(zip(flat[::2], flat[1::2], strict=True))))


def _make_by_class(machine: _PickleMachine) -> None:
    what, *args = machine.since_mark()
    machine.push(PickledObject(what, tuple(args)))


def _build(machine: _PickleMachine) -> None:
    (state,) = machine.pop(1)
    machine.top().state = state


def _call(machine: _PickleMachine, count: int) -> None:
    what, args, *named = machine.pop(count)
    machine.push(PickledObject(what, args, state=named[0] if named else None))


_DO: dict[str, Callable[[_PickleMachine, Any], object]] = {
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(1),
    "POP_MARK": lambda m, _: m.since_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "PUT": lambda m, key: m.remember(key),
    "BINPUT": lambda m, key: m.remember(key),
    "LONG_BINPUT": lambda m, key: m.remember(key),
    "MEMOIZE": lambda m, _: m.remember(None),
    "GET": lambda m, key: m.recall(key),
    "BINGET": lambda m, key: m.recall(key),
    "LONG_BINGET": lambda m, key: m.recall(key),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "EMPTY_LIST": lambda m, _: m.push(PickledObject(LIST)),
    "EMPTY_DICT": lambda m, _: m.push(PickledObject(DICT)),
    "EMPTY_SET": lambda m, _: m.push(PickledObject(SET)),
    "LIST": lambda m, _: m.push(PickledObject(LIST, parts=m.since_mark())),
    "FROZENSET": lambda m, _: m.push(PickledObject(SET, parts=m.since_mark())),
    "DICT": lambda m, _: _make_dict(m),
    "APPEND": lambda m, _: m.add(m.pop(1)),
    "APPENDS": lambda m, _: m.add(m.since_mark()),
    "ADDITEMS": lambda m, _: m.add(m.since_mark()),
    "SETITEM": lambda m, _: _add_pairs(m, m.pop(2)),
    "SETITEMS": lambda m, _: _add_pairs(m, m.since_mark()),
    "GLOBAL": lambda m, both: m.push(m.name(*both.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.push(m.name(*m.pop(2))),
    "INST": lambda m, both: m.push(PickledObject(m.name(*both.split(" ", 1)), tuple(m.since_mark()))),
    "OBJ": lambda m, _: _make_by_class(m),
    "REDUCE": lambda m, _: _call(m, 2),
    "NEWOBJ": lambda m, _: _call(m, 2),
    "NEWOBJ_EX": lambda m, _: _call(m, 3),
    "BUILD": lambda m, _: _build(m),
    "PERSID": lambda m, given: m.push(PickledObject(PERSISTENT, (given,))),
    "BINPERSID": lambda m, _: m.push(PickledObject(PERSISTENT, tuple(m.pop(1)))),
}
