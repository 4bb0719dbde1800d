"""State of the random number generators of this process (Python, numpy, torch, device) as plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of all generators that training may draw from, as plain values: Python, numpy, torch, device.

    A `Pipeline` saves it automatically. In a loop of your own, pass it as `local` of a save, because each rank has its
    own; without it, dropout draws other numbers after a resume.

        hw.checkpoint.save("checkpoints", state, step=step, local=hw.train.random_state(world.device))
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tobytes().hex(), *rest],
        "torch": _to_hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["device"] = _to_hex(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        state["device"] = _to_hex(torch.mps.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores the result of `random_state`; the state of another type of device is ignored.

    Call it last, right before training resumes: code that draws numbers after it changes the state.

        if loaded.world_size == world.world_size:               # else each rank starts from its seed
            hw.train.restore_random_state(loaded.local, world.device)
    """
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_from_hex(state["device"]), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(_from_hex(state["device"]))


@contextmanager
def temporary_state(state: Mapping[str, Any] | None, device: torch.device) -> Iterator[None]:
    """Uses the generators in `state` within the context (unchanged if None), and restores their own state on exit."""
    before = random_state(device)
    if state is not None:
        restore_random_state(state, device)
    try:
        yield
    finally:
        restore_random_state(before, device)


def _to_hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
