"""Memory that is lent: again and again, but never while anybody can still see what was put there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from headway.data import lending
from headway.data.lending import Lender

SIZE = 200_000


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_nobody_refers_to_is_lent_again() -> None:
    lender = Lender(2**24)
    first = lender.lend(SIZE)
    assert first is not None
    where = address(first)
    del first
    again = lender.lend(SIZE + 5_000)
    assert again is not None and address(again) == where, "pictures of about one size"


@pytest.mark.parametrize(
    "keep",
    [
        lambda pixels: pixels,
        lambda pixels: pixels[3:5, :, ::-1][1:, 2:3],
        lambda pixels: pixels.reshape(-1).view(np.int8),
        lambda pixels: torch.from_numpy(pixels)[0, 0],
        lambda pixels: memoryview(pixels)[1:2],
        lambda pixels: pixels.T.base,
    ],
    ids=["picture", "view", "other type", "tensor", "memoryview", "base"],
)
def test_what_anybody_can_see_is_not(keep: Any) -> None:
    lender = Lender(2**24)
    picture = simplejpeg.encode_jpeg(np.full((200, 300, 3), 77, np.uint8))
    buffer = lender.lend(3 * 200 * 300)
    assert buffer is not None
    kept, where = keep(simplejpeg.decode_jpeg(picture, buffer=buffer)), address(buffer)
    del buffer
    others = [lender.lend(3 * 200 * 300) for _ in range(3)]
    assert all(other is not None and address(other) != where for other in others)
    del kept, others
    assert where in {
        address(other) for other in [lender.lend(3 * 200 * 300) for _ in range(4)] if other is not None
    }


def test_no_more_is_kept_than_was_agreed() -> None:
    lender = Lender(2 * lending._rounded(SIZE))
    lent = [lender.lend(SIZE) for _ in range(3)]
    assert [each is None for each in lent] == [False, False, True], "then memory comes from the system"
    assert lender.lend(100) is None, "and for a thumbnail"


@pytest.mark.parametrize("size", [65_536, 65_537, 99_999, 562_500, 2**20, 2**20 + 1, 48_000_000])
def test_at_most_an_eighth_is_wasted(size: int) -> None:
    assert size <= lending._rounded(size) <= size * 9 / 8


def test_threads_never_get_the_same() -> None:
    lender, wrong = Lender(2**26), list[int]()

    def work(number: int) -> None:
        held: list[np.ndarray] = []
        for turn in range(3_000):
            array = lender.lend(SIZE)
            assert array is not None
            array[:8] = number
            held.append(array)
            if any((each[:8] != number).any() for each in held):
                wrong.append(turn)
            if len(held) > 5:
                held.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
