"""The ports of these tests can be imported, in pytest's process and in its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
