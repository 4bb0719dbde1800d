"""`NamedParts`: the parts of a pipeline by name, with an error for a misspelled name that lists the valid ones."""

from __future__ import annotations

from typing import NoReturn, TypeVar, final

from headway.errors import unknown_name

T = TypeVar("T")


@final
class NamedParts(dict[str, T]):
    """A dict whose `[]` raises an error that suggests the closest name.

    >>> NamedParts("model", {"net": 1})["nett"]
    Traceback (most recent call last):
    headway.errors.UsageError: 'nett' is not a valid model of the pipeline (did you mean 'net'?); valid: net
    """

    def __init__(self, kind: str, parts: dict[str, T] | None = None) -> None:
        super().__init__(parts or {})
        self._kind = kind

    def __missing__(self, name: object) -> NoReturn:
        raise unknown_name(f"{self._kind} of the pipeline", name, self)
