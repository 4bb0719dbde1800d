"""Trains a variant of the table, and writes each loss and a digest of all that it has trained.

EXACT_TRACE=FILE EXACT_KILL=STEP python trial.py VARIANT DIRECTORY      # killed in this step
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from variants import ALL
from variants.base import Trial, current

import headway as hw


def describe(value: Any, path: str = "") -> Iterator[str]:
    """Yields a line for each value in a state, with types and bits.

    >>> list(describe({"lr": 0.5}))
    ["['lr']: float 0.5"]
    """
    if isinstance(value, Tensor):
        dense = (value.int_repr() if value.is_quantized else value.to_dense()).detach().resolve_conj()
        bits = hashlib.sha256(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        yield f"{path}: {value.dtype} {value.layout} {tuple(value.shape)} {bits}"
    elif isinstance(value, Mapping):
        for key in value:
            yield from describe(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"{path}: {type(value).__name__} of {len(value)}"
        for number, each in enumerate(value):
            yield from describe(each, f"{path}[{number}]")
    elif isinstance(value, float | int | str | bytes | None):
        yield f"{path}: {type(value).__name__} {value!r}"
    else:
        yield f"{path}: {type(value).__name__}"


def trained(pipe: hw.Pipeline) -> dict[str, Any]:
    """Returns all that a script would use after the training."""
    found: dict[str, Any] = {}
    for name, model in pipe.registered_models.items():
        found |= {f"model {name}": model.bare.state_dict(), f"average {name}": model.average_state_dict()}
    found |= {f"optimizer {name}": each.state_dict() for name, each in pipe.optimizers.items()}
    return found | {f"scheduler {name}": each.state_dict() for name, each in pipe.schedulers.items()}


def main(name: str, directory: str) -> None:
    torch.use_deterministic_algorithms(True)
    hw.seed(0)
    trace = Path(os.environ["EXACT_TRACE"])
    current[:] = [Trial(trace=trace, kill=int(os.environ["EXACT_KILL"]))]
    pipe = ALL[name].build(Path(directory))
    pipe.run()
    trace.with_suffix(".end").write_text("\n".join(describe(trained(pipe))))


if __name__ == "__main__":
    main(*sys.argv[1:])
