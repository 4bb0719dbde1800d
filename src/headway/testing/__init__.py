"""Prove: tools for our tests and for those of our users.

    from headway.testing import ranks

    @ranks(2)
    def test_sum_over_ranks():           # runs in two processes that have called headway.init()
        ...

Installed as a pytest plugin together with headway; costs nothing until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.testing import faults, leaks
    from headway.testing.marks import ranks as ranks

_HOME = {
    "faults": "headway.testing.faults",
    "leaks": "headway.testing.leaks",
    "ranks": "headway.testing.marks",
}

__all__ = ["faults", "leaks", "ranks"]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'headway.testing' has no attribute {name!r}")
    module = import_module(home)
    return module if home == f"headway.testing.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
