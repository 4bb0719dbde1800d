"""Samples of this node's CPU, memory, disk and network, from psutil."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import psutil

_SHARED_MEMORY = "/dev/shm"


@final
class NodeMeter:
    """Samples CPU, memory, shared memory, disk and network; rates are averages since the previous sample.

    The first sample has no rates and no CPU utilization.

    >>> NodeMeter().sample().keys()
    dict_keys(['load', 'memory_used', 'memory_total', ...])
    """

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None
        self._at = 0.0

    def sample(self) -> dict[str, Any]:
        """Returns fractions, bytes, and bytes per second."""
        memory = psutil.virtual_memory()
        found = self._rates() | {
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
        return found

    def _rates(self) -> dict[str, Any]:
        """Returns CPU utilization and bytes per second since the last call; empty the first time."""
        cpu, totals, now = psutil.cpu_percent(None) / 100, _totals(), time.monotonic()
        before, passed = self._before, max(1e-3, now - self._at)
        self._before, self._at = totals, now
        if before is None:
            return {}
        rates = {
            name: round(max(0.0, total - before[name]) / passed)
            for name, total in totals.items()
            if name in before
        }
        return {"cpu": cpu, **rates}


def _totals() -> dict[str, int]:
    """Returns the bytes that this node has read, written, received and sent, except those that a sandbox hides."""
    disk, network = _counters(psutil.disk_io_counters), _counters(psutil.net_io_counters)
    found = {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes} if disk else {}
    return found | (
        {"network_received": network.bytes_recv, "network_sent": network.bytes_sent} if network else {}
    )


def _counters(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, NotImplementedError):  # gVisor has no /proc/diskstats
        return None
