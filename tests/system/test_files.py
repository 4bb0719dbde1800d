"""Files of which the tests of other rooms see little."""

from __future__ import annotations

import os

import pytest

from headway.system.files import open_unnamed


@pytest.mark.parametrize("old", [False, True], ids=["memory", "an old glibc"])
def test_a_file_without_a_name_holds_what_is_written(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        monkeypatch.delattr(os, "memfd_create")
    fd = open_unnamed("headway-test")
    try:
        os.truncate(fd, 4096)
        os.pwrite(fd, b"whole", 4091)
        assert os.pread(fd, 9, 4090) == b"\0whole" and not os.get_inheritable(fd)
        assert os.fstat(fd).st_nlink == 0 or not old
    finally:
        os.close(fd)
