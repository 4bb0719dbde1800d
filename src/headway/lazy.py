"""Names that are loaded when they are first used, so that importing a package does no work (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names live in the modules that `home` gives.

    >>> __getattr__, __dir__ = names(__name__, {"Pipeline": "headway.train", "train": "headway.train"})
    """

    def getattr_(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home[name])
        return module if home[name] == f"{package}.{name}" else getattr(module, name)

    return getattr_, lambda: sorted(home)
