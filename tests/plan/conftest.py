from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # truth.py holds published numbers for several test files

settings.register_profile("plan", deadline=None)  # a busy machine is no defect
settings.load_profile("plan")
