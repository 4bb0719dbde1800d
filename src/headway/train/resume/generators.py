"""Random number generators that a loader owns: they are part of its position, as the global ones are.

They are looked for in torch's loader, its samplers and, unless worker processes have copies of it, its dataset.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch

OwnGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_PARTS = ("generator", "sampler", "batch_sampler", "dataset", "datasets", "transform", "transforms")
_DEEPEST = 4  # a subset of a concatenation of datasets with a transform


def find(loader: object, *, samples: bool | None = None) -> dict[str, OwnGenerator]:
    """Returns the generators that a loader holds, by the path to each; `samples` includes those of its dataset.

    >>> list(find(torch.utils.data.DataLoader([1, 2], generator=torch.Generator())))
    ['generator']
    """
    if samples is None:
        samples = not getattr(loader, "num_workers", 0)
    found: dict[str, OwnGenerator] = {}
    for path, each in _walk(loader, "", 0, samples):
        if not any(each is known for known in found.values()):
            found[path] = each
    return found


def capture(loader: object) -> dict[str, Any]:
    """Returns the states of all generators of a loader as plain values."""
    return {path: state_of(each) for path, each in find(loader).items()}


def restore(loader: object, states: Mapping[str, Any]) -> None:
    """Restores the result of `capture`, for generators that the loader still has."""
    for path, each in find(loader).items():
        if path in states:
            set_state(each, states[path])


def _walk(thing: object, path: str, depth: int, samples: bool) -> Iterator[tuple[str, OwnGenerator]]:
    if isinstance(thing, OwnGenerator):
        yield path, thing
        return
    if depth > _DEEPEST or thing is None:
        return
    if isinstance(thing, list | tuple):
        parts = {str(i): part for i, part in enumerate(thing[:_DEEPEST])}
    else:
        own = getattr(thing, "__dict__", {})
        parts = {k: v for k, v in own.items() if k in _PARTS or isinstance(v, OwnGenerator)}
    for name, part in parts.items():
        if samples or name not in ("dataset", "datasets"):
            yield from _walk(part, f"{path}.{name}" if path else name, depth + 1, samples)


def state_of(generator: OwnGenerator) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state().numpy().tobytes().hex()
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return _plain(generator.bit_generator.state)
        case _:
            return _plain(generator.get_state(legacy=False))


def set_state(generator: OwnGenerator, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.set_state(state)


@final
class SavedGenerator:
    """A generator that a pipeline saves under a name."""

    def __init__(self, generator: OwnGenerator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": state_of(self.generator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state(self.generator, state["state"])


def _plain(state: Any) -> Any:
    """Returns a state of numpy without arrays, which a checkpoint cannot hold."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
