"""Settings are typed: editors complete them, and a type checker refuses those that do not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from headway.checkpoint.settings import CheckpointSettings
from headway.train.settings import CheckpointOptions, TrainOptions, TrainSettings

ROOT = Path(__file__).parents[2]
USER_CODE = Path(__file__).parent / "user_code"


@pytest.mark.parametrize(
    ("settings", "options"), [(TrainSettings, TrainOptions), (CheckpointSettings, CheckpointOptions)]
)
def test_options_have_the_fields_of_the_settings(settings: type, options: type) -> None:
    hints = get_type_hints(settings)
    assert get_type_hints(options) == {field.name: hints[field.name] for field in fields(settings)}


@pytest.mark.timeout(300)
def test_typical_mistakes_are_reported_and_correct_code_is_not() -> None:
    """As `make check` does it, with its cache: only the two files are new to it."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--show-error-codes",
        "--no-pretty",
    ]
    files = [str(USER_CODE / "correct.py"), str(USER_CODE / "mistakes.py")]
    said = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    reported: dict[tuple[str, int], set[str]] = {}
    for file, line, code in re.findall(r"(\w+\.py):(\d+): error: .*\[([\w-]+)\]", said.stdout):
        reported.setdefault((file, int(line)), set()).add(code)
    expected = {
        ("mistakes.py", number): set(re.findall(r"[\w-]+", line.partition("# mypy: ")[2]))
        for number, line in enumerate((USER_CODE / "mistakes.py").read_text().splitlines(), start=1)
        if "# mypy: " in line
    }
    assert reported == expected, said.stdout + said.stderr
