"""What tests of the data package share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headway.system.log import logger


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the library logs during a test, whatever handlers there are."""
    found: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)
