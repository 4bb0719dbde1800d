from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs code in a Python of its own, in an empty directory."""

    def run(code: str, *args: str, bound: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {
            "cwd": tmp_path,
            "timeout": 60,
            "check": True,
            "text": True,
            "capture_output": True,
        } | options
        return subprocess.run(
            [*(bound_by_modes() if bound else ()), sys.executable, "-c", code, *args], **options
        )

    return run


def bound_by_modes() -> list[str]:
    """Start of a command whose process obeys file modes, even if root starts it."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
