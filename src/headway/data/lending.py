"""Memory for pictures that is used again: fresh from the system, every 4 kB of it cost an interruption.

What is lent is an array, and whatever is made of it refers to it: views, tensors, a batch that somebody keeps. It is
lent again when nobody else refers to it any more, which its reference count says.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SMALL = 2**16  # bytes; below, malloc has something at hand
_LOOKS = 4  # at how many arrays, those first that were lent longest ago


@final
class Lender:
    """Lends arrays of bytes, and keeps at most `most` bytes of them. For many threads.

    >>> lender = Lender(2**20)
    >>> lender.lend(100_000).size
    106496
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._kept: dict[int, deque[Bytes]] = {}
        _, self._unused = _oldest(deque([np.empty(0, np.uint8)]))

    def lend(self, size: int) -> Bytes | None:
        """An array of at least `size` bytes; None where that is not worth while."""
        if size < _SMALL:
            return None
        rounded = _rounded(size)
        kept = self._kept.setdefault(rounded, deque())
        for _ in range(min(_LOOKS, len(kept))):
            try:
                array, references = _oldest(kept)  # no other thread has this one now
            except IndexError:
                break
            kept.append(array)
            if references == self._unused:
                return array
        if rounded > self._left:
            return None
        self._left -= rounded
        kept.append(array := np.empty(rounded, np.uint8))
        return array


def _oldest(kept: deque[Bytes]) -> tuple[Bytes, int]:
    """Takes an array out, and says how many references there are: as many as to a new one if it is unused. That number
    is Python's affair, so it is counted here and nowhere else."""
    array = kept.popleft()
    return array, sys.getrefcount(array)


def _rounded(size: int) -> int:
    """Up to three binary digits after the first, so that pictures of about one size can have each other's memory."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
