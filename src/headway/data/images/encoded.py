"""Images on their way to a GPU."""

from __future__ import annotations

from typing import NamedTuple

IMAGE = "__image__"
"""the part of a sample that has its image: an `EncodedImage`, or its pixels"""


class EncodedImage(NamedTuple):
    """A JPEG that is decoded on the device."""

    data: memoryview
    height: int
    width: int
    turn: int
    """its EXIF orientation; 1 if that is ignored"""
