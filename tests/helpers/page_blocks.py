"""The blocks of the pages that have a title: whole files, such as train.py."""

from __future__ import annotations

import re
from pathlib import Path


def titled(page: Path, title: str) -> str | None:
    """Returns the block of a page with this title, or None."""
    found = re.search(
        rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```', page.read_text(), re.MULTILINE | re.DOTALL
    )
    return found and found[1]
