"""Checks of settings. A bad value becomes one sentence: the key, the value, and what is valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

from headway.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LARGEST_INT = 10**12
"""No count of a plan is larger, and the product of twenty of them is still a float."""
_SMALLEST, _LARGEST = 1e-18, 1e18
"""The numbers that a plan computes with: their products and quotients are finite and not zero."""


def require_int(key: str, value: object, *, at_least: int = 1, at_most: int = _LARGEST_INT) -> int:
    """Returns the value if it is an integer from `at_least` to `at_most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{key} is {shown(value)}; expected an integer of at least {at_least}")
    if value > at_most:
        raise UsageError(f"{key} is {shown(value)}; expected an integer of at most {at_most:,}")
    return value


def require_number(key: str, value: object, *, above: float = 0.0, at_most: float = _LARGEST) -> float:
    """Returns the value as a float if it is in (above, at_most], and not closer to 0 than a plan can compute with."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value <= at_most:  # type: ignore[operator]  # also refuses nan
        limit = "" if at_most == _LARGEST and value != float("inf") else f" and at most {at_most:g}"
        raise UsageError(f"{key} is {shown(value)}; expected a number above {above:g}{limit}")
    number = float(value)  # type: ignore[arg-type]
    if 0 < number < _SMALLEST:
        raise UsageError(f"{key} is {number:g}; expected a number of at least {_SMALLEST:g}")
    return number


def shown(value: object) -> str:
    """Formats a value for a message, in at most 80 characters.

    >>> shown("8"), shown(16**5000)
    ("'8'", 'a number of thousands of digits')
    """
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to format integers of more than 4,300 digits
        return "a number of thousands of digits"


def require_choice(key: str, value: object, valid: Collection[object]) -> None:
    """Refuses a value that is not one of `valid`."""
    # `True == 1` would accept `zero: true` as stage 1
    if not any(value == choice and type(value) is type(choice) for choice in valid):
        raise unknown_name(f"value of {key}", value, valid)


def require_bools(section: str, settings: DataclassInstance) -> None:
    """Refuses settings whose fields of type `bool` have any other value."""
    for key in _bool_fields(type(settings)):
        require_choice(f"{section}.{key}", getattr(settings, key), (True, False))


@cache
def _bool_fields(settings: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(settings) if field.type == "bool")


def require_known_keys(where: str, given: Iterable[object], valid: Collection[str]) -> None:
    """Refuses an unknown key, so that a misspelled setting is not ignored."""
    for key in given:
        if key not in valid:
            raise unknown_name(f"key of {where}", key, valid)


def require_mapping(where: str, value: object) -> Mapping[str, object]:
    """Returns the value if it is a mapping with strings as keys."""
    if not _has_names(value):
        raise UsageError(f"{where} is {shown(value)}; expected a mapping of names to values")
    return value


def require_mapping_in(file: str, value: object) -> Mapping[str, object]:
    """Returns the content of a file if it is a mapping. The message does not quote it: it may be any file."""
    if not _has_names(value):
        kind = {list: "a list", dict: "a mapping with other keys than names", type(None): "nothing"}
        found = kind.get(type(value), "plain text or a number")
        raise UsageError(f"{file} holds {found}; expected a mapping of names to values")
    return value


def _has_names(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def require_divisor(key: str, part: int, whole_key: str, whole: int) -> None:
    """Refuses a part that does not divide the whole, and lists the parts that do."""
    if whole % part:
        valid = [n for n in range(1, min(whole, 1024) + 1) if whole % n == 0]
        raise UsageError(
            f"{key} is {part}, which does not divide {whole_key} ({whole}); valid: {listed(valid)}"
        )


def listed(values: Iterable[object]) -> str:
    """Joins values with commas, for a message."""
    return ", ".join(str(value) for value in values)
