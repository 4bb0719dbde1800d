"""The logger of the library.

Modules log to `logger` and configure nothing. `headway.init()` and the command line call `install_handler`, which
prints each message to standard error as one line, `headway: ...`. To route or silence the messages, configure the
logger before that; the handler is then left out:

    logging.getLogger("headway").addHandler(my_handler)
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import final

from headway.errors import escape_controls

logger = logging.getLogger("headway")


@final
class StderrHandler(logging.Handler):
    """Prints messages to the current `sys.stderr`, which a rank log may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print_last(f"headway: {self.format(record)}\n")


def _escape(record: logging.LogRecord) -> bool:
    """Escapes control characters in a message: a site's own handler may print it to a terminal, too."""
    record.msg, record.args = escape_controls(record.getMessage()), ()
    return True


logger.addFilter(_escape)


def print_last(text: str) -> None:
    """Prints to standard error, with control characters escaped; if that fails, as on a full disk, the text is lost.

    Otherwise Python would flush the text again at exit, fail, and replace the exit code with 120.
    """
    try:
        sys.stderr.write(escape_controls(text))
        sys.stderr.flush()
    except OSError:  # the terminal is gone, or the disk is full
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    except (ValueError, AttributeError):  # it is closed, or there is none
        pass


def install_handler() -> None:
    """Makes `logger` print messages of level INFO and above to standard error, unless it has a handler already."""
    if logger.handlers:
        return
    logger.addHandler(StderrHandler())
    logger.propagate = False  # otherwise a root handler prints every message a second time
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
