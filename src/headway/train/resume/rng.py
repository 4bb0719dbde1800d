"""State of the random number generators of this process (Python, numpy, torch, device) as plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.dist import seeding


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of all generators that training may draw from, as plain values: Python, numpy, torch, device.

    A `Pipeline` saves it automatically. In a loop of your own, pass it as `local` of a save, because each rank has its
    own; without it, dropout draws other numbers after a resume.

        hw.checkpoint.save("checkpoints", state, step=step, local=hw.train.random_state(world.device))
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tobytes().hex(), *rest],
        **_torch_state(device),
        "streams": seeding.streams_state(),
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores the result of `random_state`; the state of another type of device is ignored.

    Call it last, right before training resumes: code that draws numbers after it changes the state.

        if loaded.world_size == world.world_size:               # else training continues with other random numbers
            hw.train.restore_random_state(loaded.local, world.device)
    """
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))
    _restore_torch(state, device)
    seeding.load_streams_state(state["streams"])


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


@contextmanager
def fixed_state(device: torch.device) -> Iterator[None]:
    """Draws the same random numbers within each such context, on all ranks; training does not notice it."""
    with temporary_state(None, device):
        seeding.seed(0, scope="shared")
        yield


@contextmanager
def joined_streams(purpose: str, device: torch.device) -> Iterator[None]:
    """Lets all ranks draw the same numbers from torch within the context, after which their own streams continue.

    A hook may seed torch itself: then that seed is kept.
    """
    if not seeding.are_separate():
        yield
        return
    before, streams = _torch_state(device), seeding.streams_state()
    seeding.join_streams(purpose)
    joined = torch.initial_seed()
    try:
        yield
    finally:
        if torch.initial_seed() in (
            joined,
            seeding.streams_state()["own"],
        ):  # the latter, if it has read batches
            _restore_torch(before, device)
            seeding.load_streams_state(streams)


def _torch_state(device: torch.device) -> dict[str, Any]:
    state = {"torch": _to_hex(torch.get_rng_state())}
    if device.type == "cuda":
        state["device"] = _to_hex(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        state["device"] = _to_hex(torch.mps.get_rng_state())
    return state


def _restore_torch(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_from_hex(state["torch"]))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_from_hex(state["device"]), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(_from_hex(state["device"]))


def _to_hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
