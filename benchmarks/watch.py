"""How long it takes to see a run: of 1,024 ranks, of a million steps, and how much of a core the live screen takes.

    python benchmarks/watch.py [--ranks 1024] [--log-points 100000] [--refreshes 20]

A million steps with a log point every ten are 100,000 rows. Times are those of one process after its imports; CPU
seconds are more reliable than wall time on a machine that is shared. A refresh of the live screen is due every second,
so its CPU milliseconds divided by ten are the percentage of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from synthetic_run import make_run

from headway.record.events import EventLog
from headway.watch.report import render
from headway.watch.terminal import layout
from headway.watch.view import RunView


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, root: Path, refreshes: int, **settings: int) -> dict[str, float]:
    run = make_run(root, **settings)
    size_mb = sum(path.stat().st_size for path in run.metrics_dir.iterdir()) / 1e6
    view = RunView(run)
    first_wall, first_cpu = timed(lambda: layout(view.refresh(), 200, 50))
    _, again_cpu = timed(lambda: [layout(view.refresh(), 200, 50) for _ in range(refreshes)])
    tracemalloc.start()
    RunView(run).refresh()
    memory_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    _, report_cpu = timed(lambda: render(run))
    found = {
        "files_mb": size_mb,
        "first_screen_s": first_wall,
        "first_screen_cpu_s": first_cpu,
        "refresh_cpu_ms": 1000 * again_cpu / refreshes,
        "memory_mb": memory_mb,
        "report_cpu_s": report_cpu,
    }
    print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()), file=sys.stderr)
    return found


def event_us(root: Path, count: int = 1000) -> float:
    """CPU microseconds of one event."""
    events = EventLog(make_run(root), rank=0, attempt=1)
    _, cpu = timed(lambda: [events.write("warning", "a message", step=step) for step in range(count)])
    events.close()
    return 1e6 * cpu / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--log-points", type=int, default=100_000)
    parser.add_argument("--refreshes", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found: dict[str, Any] = {
            "small": measure("2 ranks, 20 rows", root, options.refreshes),
            "wide": measure(f"{options.ranks} ranks", root, options.refreshes, ranks=options.ranks),
            "long": measure(
                f"{options.log_points} rows", root, options.refreshes, log_points=options.log_points
            ),
            "event_us": event_us(root),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
