"""What all tests share."""

from __future__ import annotations

pytest_plugins = ["pytester"]
