"""Tools for the tests of headway and of its users.

    from headway.testing import ranks

    @ranks(2)
    def test_sum_over_ranks():           # runs in two processes that have called headway.init()
        ...

`plugin` is the pytest plugin, which is installed with headway and imports nothing until it is used; `runner`, `pool`,
`process` and `worker` run a test on several ranks. `faults` makes a process fail at a named place, `leaks` finds
resources that a test does not release, `verify` kills and resumes a training script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.testing import faults as faults, leaks as leaks
    from headway.testing.marks import ranks as ranks
    from headway.testing.verify import verify_resume as verify_resume

__getattr__, __dir__, __all__ = lazy.exports(__name__)
