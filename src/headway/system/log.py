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

logger = logging.getLogger("headway")


@final
class StderrHandler(logging.Handler):
    """Prints messages to what `sys.stderr` is at that moment: a rank log may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        print_last(f"headway: {escape_controls(self.format(record))}\n")


def escape_controls(text: str) -> str:
    """Escapes what a terminal would act on, but line ends and tabs: names of files may be those of another user.

    >>> escape_controls("runs/a\\x1b[2J\\nnext")
    'runs/a\\\\x1b[2J\\nnext'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def print_last(text: str) -> None:
    """Prints to standard error, and to nowhere if that takes nothing: the disk behind it may be full.

    Python tries to print again at the exit what it could not, and would replace the exit code by 120.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # the terminal is gone, or the disk is full
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    except (ValueError, AttributeError):  # it is closed, or there is none
        pass


def install_handler() -> None:
    """Makes `logger` print to standard error from INFO on, unless it has a handler already."""
    if logger.handlers:
        return
    logger.addHandler(StderrHandler())
    logger.propagate = False  # else a root handler prints every message a second time
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
