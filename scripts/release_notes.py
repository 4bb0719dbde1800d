"""Prints the section of CHANGELOG.md about a version, for a tag or a release page.

python scripts/release_notes.py               what is not released yet
python scripts/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def read_notes(changelog: str, version: str) -> str:
    """Returns the lines between the heading of a version and the next one.

    >>> read_notes("## 0.2.0 - 2026-12-01\\n\\n- new\\n\\n## 0.1.0\\n\\n- old\\n", "0.2.0")
    '- new\\n'
    """
    sections = dict(re.findall(r"^## \[?([^\s\]]+)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S))
    if version not in sections:
        raise SystemExit(
            f"release_notes: CHANGELOG.md has no section {version!r}; it has {', '.join(sections)}"
        )
    return f"{sections[version].strip()}\n"


if __name__ == "__main__":
    print(read_notes(CHANGELOG.read_text(), *(sys.argv[1:] or ["Unreleased"])), end="")
