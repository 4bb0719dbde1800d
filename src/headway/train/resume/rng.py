"""Random numbers of this process as plain values, there and back: Python's, numpy's, torch's, the device's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators that training may draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tobytes().hex(), *rest],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["device"] = _text(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        state["device"] = _text(torch.mps.get_rng_state())
    return state


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what `capture` gave; what was captured on another kind of device is left alone there."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(state["device"]), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(_bytes(state["device"]))


@contextmanager
def replayed(state: Mapping[str, Any] | None, device: torch.device) -> Iterator[None]:
    """While in here, random numbers are those of `state`; afterwards they go on as if nothing had been."""
    before = capture(device)
    if state is not None:
        restore(state, device)
    try:
        yield
    finally:
        restore(before, device)


def _text(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
