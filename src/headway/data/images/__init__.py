"""Images: crops that are the same on the CPU and on a GPU, at the speed of the decoder.

transforms (the settings that users give) -> draws (the parameters of all crops of a batch, a pure function of the
samples) -> color and cpu (the CPU's path, for one image at a time), batch (what the loop gets). rand_augment has the
operations of RandAugment, mixup the transforms of whole batches, masks those of iBOT. device/ is the GPU's path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.data.images.batch import Batch as Batch
    from headway.data.images.masks import BlockMasks as BlockMasks
    from headway.data.images.mixup import (
        CutMix as CutMix,
        Mixup as Mixup,
        RandomChoice as RandomChoice,
        RandomErasing as RandomErasing,
    )
    from headway.data.images.rand_augment import RandAugment as RandAugment, TrivialAugment as TrivialAugment
    from headway.data.images.transforms import (
        CenterCrop as CenterCrop,
        CropRecipe as CropRecipe,
        ImageTransform as ImageTransform,
        MultiCrop as MultiCrop,
        RandomResizedCrop as RandomResizedCrop,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
