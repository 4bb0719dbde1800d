"""Pickles read as data: nothing in them is imported, called or built.

A pickle is a program for a small stack machine. Here its instructions, decoded by the standard library's `pickletools`,
move plain values, names and `PickledObject`s. An instruction that would call a function makes a `PickledObject`, and
the call is recorded. torch's `weights_only=True` cannot replace this: it builds objects, refuses files with other
classes instead of listing them, and needs torch.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, final

from headway.checkpoint.format.directory import DamagedCheckpoint
from headway.system.text import shorten_list

_MOST_INSTRUCTIONS = 12_000_000  # a few seconds; a .pt file with 300,000 tensors has 10 million
_MOST_ON_STACK = 1_000_000  # picklers write containers in batches of 1000
_MOST_CALLS = 1000
_LONGEST_TEXT = 80  # characters of an argument in the description of a call


class PickledName(NamedTuple):
    """A name that loading the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@final
@dataclass(eq=False, repr=False)
class PickledObject:
    """An object that loading the pickle would build: by calling `what` with `args`, and then adding to the result.

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
    """One pickle: its value, and the imports and calls that loading it would make, calls in order."""

    value: object
    names: frozenset[PickledName]
    calls: tuple[PickledCall, ...]


@final
class PickledCall(NamedTuple):
    """A call that loading the pickle would make."""

    what: object
    args: object

    def __str__(self) -> str:
        args = self.args if isinstance(self.args, tuple) else (self.args,)
        return f"{_describe(self.what)}({', '.join(map(_describe, args[:4]))}{', ...' if args[4:] else ''})"


def _describe(value: object) -> str:
    """Returns a value in a few characters; objects may contain themselves, so their contents are left out."""
    if isinstance(value, PickledObject):
        return f"<{_describe(value.what)}>" if isinstance(value.what, PickledName) else "<object>"
    if isinstance(value, PickledName):
        return str(value)[:_LONGEST_TEXT]
    if isinstance(value, tuple):
        return "(...)"
    if isinstance(value, str | bytes | bytearray) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]!r}..."
    return repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "<integer>"


def read(
    stream: BinaryIO, name: str, is_expected: Callable[[str], object] = lambda _: False
) -> PickleContents:
    """Reads one pickle and stops after it; `DamagedCheckpoint` if there is none. `name` is for the message.

    Calls of expected names are not recorded. Loading a damaged pickle would make some calls before it fails, so the
    error lists them, too.
    """
    machine = _PickleMachine(is_expected)
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= _MOST_INSTRUCTIONS or len(machine.stack) > _MOST_ON_STACK:
                raise ValueError("it has more instructions than any that torch writes")
            machine.do(instruction.name, argument)
        return PickleContents(machine.stack.pop(), frozenset(machine.names), tuple(machine.calls))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError) as error:
        called = shorten_list(machine.calls, limit=3)
        before = f"; loading it would first call {called}" if called else ""
        raise DamagedCheckpoint(f"{name}: it is not a readable pickle: {str(error)[:200]}{before}") from error


_PUSH = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SKIP = frozenset(("PROTO", "FRAME", "STOP"))


@final
class _PickleMachine:
    def __init__(self, is_expected: Callable[[str], object]) -> None:
        self.stack: list[Any] = []
        self.names: set[PickledName] = set()
        self.calls: list[PickledCall] = []
        self._is_expected = is_expected
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
        """Returns the object to add to: a container, or another object; additions to a plain value are dropped."""
        found = self.stack[-1]
        return found if isinstance(found, PickledObject) else PickledObject(found)

    def add(self, parts: list[Any]) -> None:
        self.top().parts.extend(parts)

    def remember(self, key: int | None) -> None:
        self._memo[len(self._memo) if key is None else int(key)] = self.stack[-1]

    def recall(self, key: int) -> None:
        self.push(self._memo[int(key)])

    def call(self, what: object, args: object, state: object = None) -> None:
        """Pushes the result of calling `what`, and records the call unless it is expected."""
        if len(self.calls) < _MOST_CALLS and not (
            isinstance(what, PickledName) and self._is_expected(str(what))
        ):
            self.calls.append(PickledCall(what, args))
        self.push(PickledObject(what, args, state=state))

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
    machine.call(what, tuple(args))


def _build(machine: _PickleMachine) -> None:
    (state,) = machine.pop(1)
    machine.top().state = state


def _call(machine: _PickleMachine, count: int) -> None:
    what, args, *named = machine.pop(count)
    machine.call(what, args, named[0] if named else None)


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
    "INST": lambda m, both: m.call(m.name(*both.split(" ", 1)), tuple(m.since_mark())),
    "OBJ": lambda m, _: _make_by_class(m),
    "REDUCE": lambda m, _: _call(m, 2),
    "NEWOBJ": lambda m, _: _call(m, 2),
    "NEWOBJ_EX": lambda m, _: _call(m, 3),
    "BUILD": lambda m, _: _build(m),
    "PERSID": lambda m, given: m.push(PickledObject(PERSISTENT, (given,))),
    "BINPERSID": lambda m, _: m.push(PickledObject(PERSISTENT, tuple(m.pop(1)))),
}
