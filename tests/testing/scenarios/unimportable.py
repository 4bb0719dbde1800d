"""A test file that pytest can import and a rank cannot."""

from __future__ import annotations

import os

from headway.testing import ranks

if "RANK" in os.environ:
    raise RuntimeError("this file does not like ranks")


@ranks(1)
def test_never_runs() -> None:
    pass
