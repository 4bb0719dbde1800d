"""What psutil reports about this node at one moment, and since the last one."""

from __future__ import annotations

import time
from typing import Any, final

import psutil

_SHARED_MEMORY = "/dev/shm"


@final
class NodeMeter:
    """Samples CPU, memory, shared memory, disk and network; rates are those since the previous sample.

    >>> NodeMeter().sample().keys()
    dict_keys(['cpu', 'load', 'memory_used', 'memory_total', ...])
    """

    def __init__(self) -> None:
        psutil.cpu_percent(None)  # counts from here
        self._before, self._at = _totals(), time.monotonic()

    def sample(self) -> dict[str, Any]:
        """Returns fractions, bytes, and bytes per second."""
        memory, totals, now = psutil.virtual_memory(), _totals(), time.monotonic()
        passed = max(1e-3, now - self._at)
        rates = {
            name: max(0.0, total - self._before[name]) / passed
            for name, total in totals.items()
            if name in self._before
        }
        self._before, self._at = totals, now
        found: dict[str, Any] = {
            "cpu": psutil.cpu_percent(None) / 100,
            "load": psutil.getloadavg()[0],
            "memory_used": memory.total - memory.available,
            "memory_total": memory.total,
        }
        try:
            shared = psutil.disk_usage(_SHARED_MEMORY)
        except OSError:  # macOS has none
            pass
        else:
            found |= {"shm_used": shared.used, "shm_total": shared.total}
        return found | {name: round(rate) for name, rate in rates.items()}


def _totals() -> dict[str, int]:
    """Returns the bytes that this node has read, written, received and sent."""
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    found = {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes} if disk else {}
    return found | (
        {"network_received": network.bytes_recv, "network_sent": network.bytes_sent} if network else {}
    )
