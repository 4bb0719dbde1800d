"""Bad input becomes one sentence: the key, what was given, what is valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from headway.errors import UsageError


def require_int(key: str, value: object, *, at_least: int = 1) -> int:
    """The value as a whole number, or a sentence about the key."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{key} is {value!r}; expected a whole number of at least {at_least}")
    return value


def require_number(key: str, value: object, *, above: float = 0.0, at_most: float = float("inf")) -> float:
    """The value as a finite number in (above, at_most], or a sentence about the key."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or not above < number <= at_most or number == float("inf"):
        limit = "" if at_most == float("inf") else f" and at most {at_most:g}"
        raise UsageError(f"{key} is {value!r}; expected a number above {above:g}{limit}")
    return number


def require_choice(key: str, value: object, valid: Collection[object]) -> None:
    """Refuses a value that is not on the list, offering the nearest names."""
    for choice in valid:
        # `True == 1` would let `zero: true` pass as stage 1
        if value == choice and type(value) is type(choice):
            return
    raise UsageError(f"{key} is {value!r}{nearest(value, valid)}; valid: {listed(valid)}")


def require_known_keys(where: str, given: Iterable[object], valid: Collection[str]) -> None:
    """Refuses the first key that nobody reads: a misspelt setting must not be silently ignored."""
    for key in given:
        if key not in valid:
            raise UsageError(
                f"{where} has the unknown key {key!r}{nearest(key, valid)}; valid: {listed(valid)}"
            )


def require_mapping(where: str, value: object) -> Mapping[str, object]:
    """The value as a mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{where} is {value!r}; expected a mapping of names to values")
    return value


def require_divisor(key: str, part: int, whole_key: str, total: int) -> None:
    """Refuses a part that does not divide its whole, and lists the parts that do."""
    if total % part:
        valid = [n for n in range(1, min(total, 1024) + 1) if total % n == 0]
        raise UsageError(
            f"{key} is {part}, which does not divide {whole_key} ({total}); valid: {listed(valid)}"
        )


def nearest(value: object, valid: Collection[object]) -> str:
    close = get_close_matches(str(value).lower(), [str(choice) for choice in valid], n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)
