"""The library's logger is as in a process that has just started, in every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headway.system.log import logger


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """Removes the handler that `init` or a command installed: it stays for the life of a process, which tests share."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
