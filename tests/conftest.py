"""What all tests share."""

from __future__ import annotations

import signal

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """A shell that starts us in the background has Ctrl-C ignored, also in all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
