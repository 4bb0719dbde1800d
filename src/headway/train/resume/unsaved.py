"""What training changes and no checkpoint has: buffers that are not persistent, and generators that a dataset owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from headway.data import DataLoader
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.resume import generators

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline

_MOST_ELEMENTS = 1 << 20
"""of a buffer that is watched: a larger one is a table or a mask"""


@final
class UnsavedState:
    """Warns once, by name. Most buffers that are not persistent are constants, so only one that changes is named."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Notes what buffers are before training; warns of generators."""
        self._before = {
            name: buffer.detach().clone()
            for name, buffer in self._buffers().items()
            if buffer.numel() <= _MOST_ELEMENTS
        }
        for name, loader in self._pipe.datasets.items():
            own = generators.find(loader, samples=True) if isinstance(loader, DataLoader) else {}
            if found := [path for path in own if path.startswith("dataset.")]:
                self._warn(
                    f"dataset {name!r} has random number generators of its own ({shorten_list(found)}), whose state is "
                    "not saved: a resumed run draws other numbers; draw from torch, numpy.random or random instead"
                )

    def check(self) -> None:
        """Warns of the buffers that training has changed; called where a checkpoint is written."""
        if not self._before:
            return
        now = self._buffers()
        changed = [
            name for name, old in self._before.items() if name in now and not torch.equal(now[name], old)
        ]
        if changed:
            self._before = {}
            self._warn(
                f"training changes buffers that are not persistent, so checkpoints do not have them "
                f"({shorten_list(changed)}): register them with persistent=True, or a resumed run begins with their "
                "first values"
            )

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": buffer
            for name, model in self._pipe.registered_models.items()
            for path, module in model.bare.named_modules()
            for key in module._non_persistent_buffers_set
            if isinstance(buffer := module._buffers.get(key), Tensor) and not buffer.is_meta
        }

    def _warn(self, message: str) -> None:
        if self._pipe.world.is_root:
            logger.warning(message)
