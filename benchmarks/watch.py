"""How long it takes to see a run: of 1,024 ranks, of a million steps, and how much of a core the live screen takes.

    python benchmarks/watch.py [--ranks 1024] [--log-points 100000] [--refreshes 20] [--copies 20]

A million steps with a log point every ten are 100,000 rows. Times are those of one process after its imports; CPU
seconds are more reliable than wall time on a machine that is shared. A refresh of the live screen is due every second,
so its CPU milliseconds divided by ten are the percentage of a core.

The page of `headway web` is opened in Chromium: how long until its first curve is drawn, until all rows are read, and
how much memory the server takes after one and after many long runs were opened.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import psutil
from synthetic_run import make_run

from headway.record.events import EventLog
from headway.run import Run
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


def measure_page(root: Path, log_points: int, copies: int) -> dict[str, float]:
    """Seconds until the first curve of a long run is drawn and until it is whole, and the memory of the server."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        print("the page: there is no Chromium, so it is not measured", file=sys.stderr)
        return {}
    long = make_run(root / "web", log_points=log_points)
    command = [sys.executable, "-m", "headway", "web", str(root / "web"), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = visit(server, program, long, copies)
    finally:
        server.terminate()
        server.wait()
    print("the page: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()), file=sys.stderr)
    return found


def visit(server: subprocess.Popen[str], program: str, long: Run, copies: int) -> dict[str, float]:
    """Opens a long run, and then copies of it, one after the other."""
    from playwright.sync_api import sync_playwright

    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    process = psutil.Process(server.pid)
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=program, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page()
        page.goto(url)  # what follows does not include the start of the browser
        page.goto("about:blank")
        page.goto(f"{url}#/run/{long.id}", wait_until="commit")
        page.wait_for_selector(".panel canvas")
        drawn_s = float(page.evaluate("performance.now()")) / 1000
        begin = time.perf_counter()
        page.wait_for_selector(".controls > .soft:empty", state="attached", timeout=120_000)
        found = {
            "first_curve_s": drawn_s,
            "whole_s": drawn_s + time.perf_counter() - begin,
            "server_mb": process.memory_info().rss / 1e6,
        }
        for _ in range(copies):
            copy = make_run(long.path.parent)
            copy.metrics_file(0).unlink()
            os.link(long.metrics_file(0), copy.metrics_file(0))
            page.goto("about:blank")
            page.goto(f"{url}#/run/{copy.id}", wait_until="commit")
            page.wait_for_selector(".panel canvas")
        found[f"server_mb_after_{copies + 1}"] = process.memory_info().rss / 1e6
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
    parser.add_argument("--copies", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found: dict[str, Any] = {
            "small": measure("2 ranks, 20 rows", root, options.refreshes),
            "wide": measure(f"{options.ranks} ranks", root, options.refreshes, ranks=options.ranks),
            "long": measure(
                f"{options.log_points} rows", root, options.refreshes, log_points=options.log_points
            ),
            "page": measure_page(root, options.log_points, options.copies),
            "event_us": event_us(root),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
