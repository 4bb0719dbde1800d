"""Prove: tools for our tests and for those of our users.

    from headway.testing import ranks

    @ranks(2)
    def test_sum_over_ranks():           # runs in two processes that have called headway.init()
        ...

Installed as a pytest plugin together with headway; costs nothing until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.testing import faults as faults, leaks as leaks
    from headway.testing.marks import ranks as ranks
    from headway.testing.verify import verify_resume as verify_resume

__getattr__, __dir__, __all__ = lazy.exports(__name__)
