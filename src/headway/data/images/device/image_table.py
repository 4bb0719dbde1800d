"""`ImageTable`: where images are in device memory, for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.data.order.permutation import Ints


class ImageTable(NamedTuple):
    """Where images are in device memory: a row for each."""

    rows: Ints
    """the address of the first byte, and the strides of channel, row and column"""
    sizes: Ints
    """height and width"""
    device: torch.device

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> ImageTable:
        """Returns the table of images of bytes, 3 x height x width, with any strides."""
        rows = np.array([(image.data_ptr(), *image.stride()) for image in images])
        return cls(rows, np.array([image.shape[1:] for image in images]), images[0].device)

    def turned(self, turns: Ints) -> ImageTable:
        """Returns the table of the images turned by their EXIF orientations: strides change, pixels are not copied."""
        if (turns == 1).all():
            return self
        rows, sizes = self.rows.copy(), self.sizes.copy()
        across = turns >= 5
        rows[across, 2], rows[across, 3] = rows[across, 3], rows[across, 2]
        sizes[across] = sizes[across, ::-1]
        for column, side, backward in ((2, 0, (3, 4, 7, 8)), (3, 1, (2, 3, 6, 7))):
            at = np.isin(turns, backward)
            rows[at, 0] += (sizes[at, side] - 1) * rows[at, column]
            rows[at, column] *= -1
        return ImageTable(rows, sizes, self.device)

    @classmethod
    def select(cls, tables: Sequence[ImageTable], chosen: Ints) -> ImageTable:
        """Returns the table of some images, given their numbers in the concatenated tables."""
        rows, sizes = (np.concatenate([table[column] for table in tables])[chosen] for column in (0, 1))
        return cls(rows, sizes, tables[0].device)
