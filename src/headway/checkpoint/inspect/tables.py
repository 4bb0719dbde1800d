"""The overview of a checkpoint: its tensors by module. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final


@final
@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """Name, dtype, shape and bytes of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@final
@dataclass(frozen=True, kw_only=True)
class Overview:
    """All tensors of a file or checkpoint, and facts from its manifest."""

    path: Path
    about: dict[str, Any]
    tensors: tuple[TensorSummary, ...]

    def modules(self) -> dict[str, list[TensorSummary]]:
        """Returns the tensors by the module that they belong to, in their order."""
        grouped: dict[str, list[TensorSummary]] = {}
        for tensor in self.tensors:
            grouped.setdefault(tensor.module, []).append(tensor)
        return grouped

    def to_dict(self) -> dict[str, Any]:
        """Returns the overview as plain values, for JSON."""
        return {
            "path": str(self.path),
            **self.about,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "modules": {name: totals(tensors) for name, tensors in self.modules().items()},
            "total": totals(self.tensors),
        }


def totals(tensors: Iterable[TensorSummary]) -> dict[str, int]:
    """Returns the number of tensors, elements and bytes."""
    listed = list(tensors)
    return {
        "tensors": len(listed),
        "elements": sum(math.prod(tensor.shape) for tensor in listed),
        "bytes": sum(tensor.bytes for tensor in listed),
    }
