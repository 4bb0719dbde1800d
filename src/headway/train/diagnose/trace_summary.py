"""The summary of a trace as text: step times, data wait, idle time of the device, and the longest operators."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

_ROWS = 12
_NAME_CHARACTERS = 60
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def summarize(events: Sequence[dict[str, Any]], averages: Iterable[Any], *, title: str, device: str) -> str:
    """Returns a summary of a window; `averages` are those of `torch.profiler`, by operator and kernel."""
    spans = [each for each in events if each.get("ph") == "X"]
    steps = step_intervals(spans)
    lines = [f"profile of {title}"]
    whole = steps[-1][1] - steps[0][0] if steps else 0.0
    if steps:
        times = [(end - begin) / 1e3 for begin, end in steps]
        lines.append(
            f"  step           {statistics.median(times):.2f} ms (median of {len(times)}; {min(times):.2f} to "
            f"{max(times):.2f} ms)"
        )
        waited = sum(each["dur"] for each in spans if each["name"] == "headway/data")
        lines.append(f"  data wait      {_share(waited, whole)} of the window")
    busy = [(each["ts"], each["ts"] + each["dur"]) for each in spans if each.get("cat") in _ON_DEVICE]
    if busy and steps:
        within = [
            (max(a, steps[0][0]), min(b, steps[-1][1]))
            for a, b in busy
            if b > steps[0][0] and a < steps[-1][1]
        ]
        lines.append(f"  device idle    {_share(whole - covered(within), whole)} of the window ({device})")
    else:
        lines.append(f"  device idle    not measured: {device} has no kernels of its own")
    known = [each for each in averages if not each.key.startswith(("headway/", "ProfilerStep"))]
    kernels = [(each.key, each.self_device_time_total, each.count) for each in known]
    operators = [(each.key, each.self_cpu_time_total, each.count) for each in known]
    lines += _table("kernels by their own time on the device", kernels)
    lines += _table("operators by their own time on the host", operators)
    return "\n".join(lines)


def step_intervals(spans: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns begin and end of each step, in microseconds: from its wait for data to the end of its last mark."""
    marks = sorted(
        (each["ts"], each["ts"] + each["dur"], each["name"])
        for each in spans
        if each["name"] == "headway/data" or each["name"].startswith("headway/step ")
    )
    found: dict[str, tuple[float, float]] = {}
    waiting: float | None = None
    for begin, end, name in marks:
        if name == "headway/data":
            waiting = begin if waiting is None else waiting
            continue
        first = found[name][0] if name in found else begin if waiting is None else waiting
        found[name], waiting = (first, end), None
    return list(found.values())


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, part) / whole:.1%}" if whole else "0%"


def _table(title: str, rows: Sequence[tuple[str, float, int]]) -> list[str]:
    total = sum(row[1] for row in rows)
    if not total:
        return []
    top = sorted(rows, key=lambda row: -row[1])[:_ROWS]
    return [f"  {title}"] + [
        f"    {time / 1e3:10.2f} ms  {_share(time, total):>6}  {count:>7,} x  {name[:_NAME_CHARACTERS]}"
        for name, time, count in top
        if time > 0
    ]
