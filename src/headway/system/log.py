"""The logger of the library.

Modules log to `logger` and configure nothing. `headway.init()` and the command line call `install_handler`, which
prints each message to standard error as one line, `headway: ...`. To route or silence the messages, configure the
logger before that; the handler is then left out:

    logging.getLogger("headway").addHandler(my_handler)
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import final

logger = logging.getLogger("headway")


@final
class StderrHandler(logging.Handler):
    """Prints messages to what `sys.stderr` is at that moment: a rank log may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        with suppress(OSError, ValueError, AttributeError):  # the terminal is gone, closed, or there is none
            sys.stderr.write(f"headway: {text}\n")
            sys.stderr.flush()


def install_handler() -> None:
    """Makes `logger` print to standard error from INFO on, unless it has a handler already."""
    if logger.handlers:
        return
    logger.addHandler(StderrHandler())
    logger.propagate = False  # else a root handler prints every message a second time
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
