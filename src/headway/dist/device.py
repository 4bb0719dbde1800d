"""The device that a rank computes on."""

from __future__ import annotations

import os

import torch

from headway.dist.environment import check_device
from headway.dist.roster import RankPlacement
from headway.errors import UsageError

_QUEUES_NAME, _QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
QUEUES = f"{_QUEUES_NAME}={_QUEUES}"
"""the largest number of hardware queues; CUDA's default is 8"""


def choose_device(kind: str, placement: RankPlacement, world_size: int) -> torch.device:
    """Picks the rank's device, and makes it the current one.

    If a scheduler has assigned GPUs to tasks, each task sees only its own, and uses the first one. Otherwise all ranks
    of the node see all GPUs, and the local rank is the index.
    """
    check_device(kind)
    if kind == "auto":
        kind = automatic_kind(world_size)
    if kind == "cuda":
        device = torch.device("cuda", _cuda_index(placement))
        use_many_queues()
        torch.cuda.set_device(device)
        return device
    if kind == "mps":
        if world_size > 1:
            raise UsageError(
                f"device='mps' works for one process, but there are {world_size} ranks; use device='cpu'"
            )
        if not torch.backends.mps.is_available():
            raise UsageError("device='mps' is not available on this machine; use device='auto' or 'cpu'")
    return torch.device(kind)


def automatic_kind(world_size: int) -> str:
    """Returns the kind of device that "auto" chooses here: torch calls AMD's GPUs cuda, too."""
    return "cuda" if torch.cuda.is_available() else "mps" if _has_mps(world_size) else "cpu"


def exact_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for sums and weights on a device: double precision, which MPS does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def use_many_queues() -> bool:
    """Lets CUDA use all hardware queues of a GPU, unless it is initialized or the user has set a number.

    Returns whether CUDA uses all of them. Streams that share a queue wait for each other. The image decoder has 14
    streams, so with 8 queues a training kernel on any stream stops it: on an H200, one busy thread reduces 35,000
    photos a second to 5,500.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_QUEUES_NAME, str(_QUEUES))
    given = os.environ.get(_QUEUES_NAME, "")
    return given.isdigit() and int(given) >= _QUEUES


def _has_mps(world_size: int) -> bool:
    return world_size == 1 and torch.backends.mps.is_available()


def _cuda_index(placement: RankPlacement) -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError("device='cuda' is not available: torch sees no GPU; use device='auto' or 'cpu'")
    if placement.gpus_assigned or count == 1:
        return 0
    if placement.local_rank >= count:
        raise UsageError(
            f"{placement.local_world_size} ranks run on this node, but only {count} GPUs are visible to them; "
            f"start at most {count} ranks per node, or use device='cpu'"
        )
    return placement.local_rank
