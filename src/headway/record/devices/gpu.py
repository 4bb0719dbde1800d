"""Samples of the GPUs of this machine, from NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pynvml as nv

Sample = dict[str, Any]
T = TypeVar("T")

_THROTTLING = {
    nv.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    nv.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    nv.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    nv.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    nv.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
"""reasons for lower clocks that users should know about, unlike an idle GPU or clocks set by a user"""


@contextmanager
def nvml_session() -> Iterator[list[Any]]:
    """Yields the handles of all GPUs, or the error in place of one that is lost; none without a driver."""
    try:
        nv.nvmlInit()
    except nv.NVMLError:
        yield []
        return
    try:
        yield list(_handles())
    finally:
        nv.nvmlShutdown()


def _handles() -> Iterator[Any]:
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            yield nv.nvmlDeviceGetHandleByIndex(index)
        except nv.NVMLError_NoPermission:  # another job's
            continue
        except nv.NVMLError as error:
            yield error


def sample_gpu(index: int, handle: Any) -> Sample:
    """Returns utilization (0 to 1), memory (bytes), power (W), temperature (C), clocks (MHz), throttling, ECC errors.

    What a GPU does not report is left out; one that is lost has only its index and the error.
    """
    if isinstance(handle, nv.NVMLError):
        return {"index": index, "error": str(handle)}
    try:
        found: Sample = {"index": index, "uuid": nv.nvmlDeviceGetUUID(handle)}
    except nv.NVMLError as error:
        return {"index": index, "error": str(error)}
    memory = _ask(lambda: nv.nvmlDeviceGetMemoryInfo(handle))
    facts = {
        "utilization": _ask(lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        "memory_used": memory and int(memory.used),
        "memory_total": memory and int(memory.total),
        "power": _ask(lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1000),
        "power_limit": _ask(lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "temperature": _ask(lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),
        "clock": _ask(lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)),
        "clock_max": _ask(lambda: nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM)),
        "throttling": _ask(lambda: throttle_reasons(nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        "ecc_errors": _ask(
            lambda: nv.nvmlDeviceGetTotalEccErrors(
                handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_AGGREGATE_ECC
            )
        ),
    }
    return found | {name: value for name, value in facts.items() if value is not None}


def memory_errors(handle: Any) -> Sample:
    """Returns uncorrectable ECC errors since the last reset, and whether a row remapping is pending or failed.

    What a GPU does not report is left out.
    """
    if isinstance(handle, nv.NVMLError):
        return {}
    rows = _ask(lambda: nv.nvmlDeviceGetRemappedRows(handle))  # corrected, uncorrected, pending, failed
    facts = {
        "ecc_since_reset": _ask(
            lambda: nv.nvmlDeviceGetTotalEccErrors(
                handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC
            )
        ),
        "remap_pending": rows and bool(rows[2]),
        "remap_failed": rows and bool(rows[3]),
    }
    return {name: value for name, value in facts.items() if value is not None}


def throttle_reasons(mask: int) -> list[str]:
    """Returns why the clocks are reduced.

    >>> throttle_reasons(nv.nvmlClocksThrottleReasonSwPowerCap | nv.nvmlClocksThrottleReasonGpuIdle)
    ['power cap']
    """
    return [reason for bit, reason in _THROTTLING.items() if mask & bit]


def _ask(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except nv.NVMLError:  # not supported by this GPU, not permitted, or the GPU is lost
        return None
