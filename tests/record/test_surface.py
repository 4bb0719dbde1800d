"""The names of the package: they exist, in order, and the light ones do not drag torch in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway import record


def test_every_name_is_there() -> None:
    assert record.__all__ == sorted(record.__all__)
    for name in record.__all__:
        assert getattr(record, name).__name__ == name


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="recordings"):
        record.recordings  # noqa: B018


def test_rank_logs_need_no_torch() -> None:
    code = "import sys; from headway.record import rank_log; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
