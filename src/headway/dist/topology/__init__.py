"""The machine and its links: GPUs, NVLink, InfiniBand and network interfaces, and whether every link works.

`machine` and `nvml` read facts without torch, `nccl` turns them into the few settings that a job needs, and
`interconnect` measures every link between the ranks of a group; `clocks` compares the clocks of their nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.dist.topology.interconnect import (
        Interconnect as Interconnect,
        Link as Link,
        check_interconnect as check_interconnect,
    )
    from headway.dist.topology.machine import Topology as Topology, detect as detect
    from headway.dist.topology.nccl import nccl_settings as nccl_settings
    from headway.dist.topology.nvml import Driver as Driver, Gpu as Gpu

__getattr__, __dir__, __all__ = lazy.exports(__name__)
