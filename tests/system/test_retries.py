"""A read that waits for its next try notices that a stop is requested."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import wait_until

from headway.errors import StorageError
from headway.system import retries


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retries, "_STOPPING_WAIT_S", 0.01)
    yield
    retries.stop_requested.clear()


def test_a_requested_stop_tries_again_at_once_and_then_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 1000.0))
    tries: list[bool] = []

    def read() -> str:
        tries.append(retries.stop_requested.is_set())
        if len(tries) < 9:
            raise OSError(errno.EIO, "Input/output error")
        return "read"

    read_by: list[str] = []
    reader = threading.Thread(target=lambda: read_by.append(retries.retry("read x", read)), daemon=True)
    reader.start()
    wait_until(lambda: len(tries) == 2, "it waits for its third try")
    retries.stop_requested.set()
    reader.join(60)
    assert read_by == ["read"] and tries == [False] * 2 + [True] * 7


def test_a_requested_stop_does_not_prolong_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", (0.1, 0.1))
    retries.stop_requested.set()

    def read() -> None:
        raise OSError(errno.EIO, "Input/output error")

    began = time.monotonic()
    with pytest.raises(StorageError, match=r"could not read x: Input/output error, [0-9]+ times in 0 s"):
        retries.retry("read x", read)
    assert time.monotonic() - began >= 0.2
