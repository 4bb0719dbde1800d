"""Samples of a node's devices while a run trains: GPUs with NVML, the rest with psutil, as rows in `nodes/HOST.jsonl`.

One process per node takes them, a child of local rank 0, so that a driver call that hangs delays neither training nor
the agent. The process ends with its parent, or once another process holds the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.record.devices.sampling import sampling_devices as sampling_devices

__getattr__, __dir__, __all__ = lazy.exports(__name__)
