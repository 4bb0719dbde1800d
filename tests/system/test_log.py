from __future__ import annotations

import io
import logging
import sys

import pytest

from headway.system.log import StderrHandler, install_handler, logger


def test_messages_go_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    install_handler()
    install_handler()
    logger.info("resuming from step %d", 7)
    logger.debug("not shown")
    assert capsys.readouterr() == ("", "headway: resuming from step 7\n")


def test_a_root_handler_does_not_print_them_again(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)
    try:
        install_handler()
        logger.warning("disk full")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().err == "headway: disk full\n"


def test_messages_follow_a_replaced_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install_handler()
    new = io.StringIO()
    monkeypatch.setattr(sys, "stderr", new)
    logger.info("here")
    assert new.getvalue() == "headway: here\n"


def test_a_closed_standard_error_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install_handler()
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        logger.warning("nobody reads this")


def test_a_handler_of_the_user_stays_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    logger.addHandler(logging.NullHandler())
    install_handler()
    logger.warning("silenced")
    assert not any(isinstance(handler, StderrHandler) for handler in logger.handlers) and logger.propagate
    assert capsys.readouterr().err == ""
