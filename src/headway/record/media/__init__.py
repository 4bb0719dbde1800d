"""Media: the images, figures, histograms and texts that a run keeps under `media/`.

    for item in read_media(run):
        print(item.step, item.name, item.kind, item.path(run))

`index` is the format and its reader, which needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.record.media.index import (
        MediaIndex as MediaIndex,
        MediaItem as MediaItem,
        read_histogram as read_histogram,
        read_media as read_media,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
