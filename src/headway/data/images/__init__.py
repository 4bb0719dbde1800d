"""Images: crops that are the same on the CPU and on a GPU, at the speed of the decoder.

transforms (the settings that users give) -> draws (the parameters of all crops of a batch, a pure function of the
samples) -> color and cpu (the CPU's path, for one image at a time), batch (what the
loop gets). On a GPU: nvjpeg (decoding), kernels and gpu (cropping), device_batch (whole batches, on streams of the
loader); these modules need Triton, and are imported when a loader has a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.images.batch import Batch as Batch
    from headway.data.images.mixup import (
        CutMix as CutMix,
        Mixup as Mixup,
        RandomChoice as RandomChoice,
        RandomErasing as RandomErasing,
    )
    from headway.data.images.transforms import (
        CenterCrop as CenterCrop,
        CropGroup as CropGroup,
        CropRecipe as CropRecipe,
        ImageTransform as ImageTransform,
        MultiCrop as MultiCrop,
        RandomResizedCrop as RandomResizedCrop,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
