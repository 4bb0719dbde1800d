"""One rank as pytest's process sees it: what is left of it is ended with all that it has started."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import psutil
import pytest
from waiting import has_ended, wait_until

from headway.testing.process import RankHandle

PLAIN, DEAF = "sleep 1000", "(trap '' TERM; sleep 1001; sleep 1002)"
"""a child that ends by SIGTERM, and one that ignores it, as multiprocessing's resource tracker does"""


@pytest.mark.parametrize("child", [PLAIN, DEAF])
def test_the_children_of_a_rank_end_with_it(child: str) -> None:
    def start(**descriptors: int) -> Any:
        given = {name: descriptors[name] for name in ("stdout", "stderr")}
        command = f"{child} >/dev/null 2>&1 & echo $!; wait"
        return subprocess.Popen(["sh", "-c", command], start_new_session=True, **given)

    rank, text = RankHandle(0, start), ""

    def has_started() -> bool:
        nonlocal text
        text += rank.stdout.read_new()
        return text.endswith("\n")

    wait_until(has_started, "the child has started")
    started = psutil.Process(int(text))
    try:
        assert rank.reap() == -9
        wait_until(lambda: has_ended(started), "its child ends")
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in [*started.children(), started]:
                process.kill()
        rank.disconnect()
        rank.close()
