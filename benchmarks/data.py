"""Decoded images per second from JPEG shards: headway, its peers, and the decoder alone.

    scripts/make-peers.sh            # once: the peers, in an environment of their own
    python benchmarks/data.py [--samples 4096] [--thumbnails 300000] [--threads 2] [--rounds 3] [--json results.json]

All read the same photos from a warm page cache, in batches of 64, decoded to RGB; see data_peers.py. Each loader
runs in a process of its own, and is timed after its imports. Rounds are interleaved and medians printed, because
machines are shared: ratios are more reliable than rates, and CPU time per image, in the middle of an epoch, is more
reliable than both. The limit is the same number of threads decoding bytes in memory into memory that is already mapped.

Thumbnails, in hundreds of shards, show how many samples per second a loader reads when decoding takes almost no time;
their rate is that of the second half of an epoch, or of its first 15 seconds.
Resuming at 90 % of an epoch is timed on both, from a state to the first batch. With photos most of that time is the
decoding of 64 of them; with thumbnails it is the search for the position.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

LASTING_S = 15.0  # that thumbnails are read for at most
HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("HEADWAY_PEERS", HERE.parent / ".peers"))


# --- in the process of a contender


def run_task(task: str, name: str, data: Path, threads: int) -> dict[str, float]:
    """Runs one task: an epoch (`run`), its beginning (`start`), what `lasts` of its rate, `save` a state at 90 %, or
    `resume` from it."""
    from data_peers import BATCH, CONTENDERS

    state = data / f"{name}.state"
    contender = CONTENDERS[name](data, threads, state if task == "resume" else None)
    contender.imports()
    print("ready", flush=True)
    batches = contender.batches()
    if task == "resume":
        began = time.perf_counter()
        next(batches)
        seen = {"first": time.perf_counter() - began}
    elif task == "save":
        total, images = int((data / "samples").read_text()), 0
        while images + BATCH <= total * 9 // 10:
            images += next(batches)
        contender.save(state)
        seen = {"images": images}
    elif task == "lasts":
        seen = {"rate": lasting_rate(batches)}
    else:
        total, most = int((data / "samples").read_text()), {"start": 16, "run": None}[task]
        seen = timed(islice(batches, most), min(total, BATCH * (most or total)))
    print(json.dumps(seen), flush=True)
    os._exit(0)  # with workers that are stopped on the way, peers may wait for ever


def timed(batches: Iterator[int], expected: int) -> dict[str, float]:
    """Measures a loader that yields about as many images as are expected.

    CPU time is that of the second and third quarter: at both ends of it a loader is equally far ahead, and an epoch of
    a million images has its start only once.
    """
    first, images, began, start = None, 0, time.perf_counter(), (0, cpu_seconds())
    middle: list[tuple[int, float]] = []
    for count in batches:
        if not count:
            began, start = time.perf_counter(), (0, cpu_seconds())
            continue
        first = first or time.perf_counter() - began
        images += count
        if len(middle) < 2 and images >= expected * (1 + 2 * len(middle)) // 4:
            middle.append((images, cpu_seconds()))
    took = time.perf_counter() - began
    middle = middle if len(middle) == 2 else [start, (images, cpu_seconds())]
    (before, spent), (after, in_all) = middle
    cpu = (in_all - spent) / (after - before)
    return {"rate": images / took, "first": first or 0.0, "images": images, "cpu": cpu}


def lasting_rate(batches: Iterator[int]) -> float:
    """Returns images per second in the second half of an epoch, or of its first seconds: what starts once, has."""
    began, images, seen = time.perf_counter(), 0, list[tuple[float, int]]()
    for count in batches:
        images += count
        seen.append((time.perf_counter() - began, images))
        if seen[-1][0] > LASTING_S:
            break
    (half_s, half), (whole_s, whole) = seen[len(seen) // 2], seen[-1]
    return (whole - half) / (whole_s - half_s)


def cpu_seconds() -> float:
    """CPU seconds of this process and its workers, ended and running."""
    import psutil

    workers = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(os.times()[:4]) + sum(each.user + each.system for each in workers)


# --- in the process that compares


class Comparison:
    """The data, and the loaders that are installed."""

    def __init__(self, data: Path, threads: int) -> None:
        from data_peers import CONTENDERS

        self.data, self.threads = data, threads
        self.contenders = {name: kind for name, kind in CONTENDERS.items() if kind.is_installed()}
        self.absent = [kind.title for name, kind in CONTENDERS.items() if name not in self.contenders]

    def let(self, task: str, name: str, *, watch: bool = False) -> dict[str, float]:
        """Runs one task in a process of its own; `watch` also measures its memory beyond its imports."""
        program = [sys.executable, "-W", "ignore", str(HERE / "data.py")]
        command = [*program, "--run_task", task, name, str(self.data)]
        log = (self.data / "log.txt").open("a")
        child = subprocess.Popen(
            [*command, "--threads", str(self.threads)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise SystemExit(f"{name} does not start: {(self.data / 'log.txt').read_text()[-2000:]}")
        memory = peak_memory(child) if watch else 0.0
        seen = next((line for line in child.stdout if line.startswith("{")), None)
        with suppress(ProcessLookupError):  # none left
            os.killpg(child.pid, signal.SIGKILL)  # the workers, too
        child.wait()
        if seen is None:
            raise SystemExit(f"{name} failed: {(self.data / 'log.txt').read_text()[-2000:]}")
        return json.loads(seen) | {"memory": memory}


def peak_memory(child: subprocess.Popen[str]) -> float:
    """Peak bytes of a process and its children beyond the present ones; shared pages count once."""
    import psutil

    def held() -> int:
        total = 0
        for process in [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue  # ended meanwhile
        return total

    before, most = held(), 0
    while child.poll() is None:
        try:
            most = max(most, held())
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    return float(most - before)


def photo(rng: Any) -> bytes:
    """An image that costs a decoder as much as a photo: smooth, with noise; about 500 x 375 and 70 kB."""
    import numpy as np
    import simplejpeg

    height, width = rng.integers(340, 420), rng.integers(460, 540)
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3)).astype(np.float32)
    y, x = np.linspace(0, len(coarse) - 1.01, height), np.linspace(0, coarse.shape[1] - 1.01, width)
    rows = (
        coarse[y.astype(int)] * (1 - y % 1)[:, None, None]
        + coarse[y.astype(int) + 1] * (y % 1)[:, None, None]
    )
    smooth = rows[:, x.astype(int)] * (1 - x % 1)[:, None] + rows[:, x.astype(int) + 1] * (x % 1)[:, None]
    noisy = smooth + rng.normal(0, 8, smooth.shape)
    return simplejpeg.encode_jpeg(noisy.clip(0, 255).astype(np.uint8), quality=85)


def make(directory: Path, count: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    photos = [photo(rng) for _ in range(256)]
    mean = sum(map(len, photos)) // 256
    print(f"{count} samples of 256 photos, mean {mean / 1000:.0f} kB", flush=True)
    _pack(directory, photos, count, mean * count // 8 + 2**20)


def make_thumbnails(directory: Path, count: int) -> None:
    """Packs about a thousand samples per shard, as is common."""
    import numpy as np
    import simplejpeg

    rng = np.random.default_rng(1)
    images = [simplejpeg.encode_jpeg(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(256)]
    _pack(directory, images, count, 2560 * 1000)


def _pack(directory: Path, images: list[bytes], count: int, shard_size: int) -> None:
    from headway.data import pack

    samples = ({"__key__": f"{n:07d}", "jpg": images[n % 256], "cls": n % 1000} for n in range(count))
    pack(samples, directory / "shards", shard_size=shard_size)
    (directory / "samples").write_text(str(count))


def raw_bytes(data: Path) -> dict[str, float]:
    """GB/s of sample bytes from the node cache into a batch, and of memcpy; best of seven, CPU time.

    Finding a sample is counted. memcpy copies pieces of the same sizes, and as a second measure a batch at once: large
    copies go around the processor's cache, and are faster than any loader of single samples can be.
    """
    import numpy as np

    from headway.data import NodeCache
    from headway.data.cache.node_cache import CachedShards

    time.sleep(2.1)  # the cache does not trust what has only just been written
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        cache = CachedShards(NodeCache(path=where, copy_local=True))
        shards = [cache.open(path) for path in sorted((data / "shards").glob("*.tar"))]
        samples = [(shard, number) for shard in shards for number in range(len(shard))]
        sizes = [len(view) for shard, number in samples for view in shard[number].values()]
        batch, plain = memoryview(bytearray(64 * max(sizes))), memoryview(np.ones(sum(sizes), np.uint8))
        seconds = {
            "sample_gb_s": best(lambda: _copy_samples(samples, batch)),
            "memcpy_pieces_gb_s": best(lambda: _copy_pieces(sizes, plain, batch)),
            "memcpy_gb_s": best(
                lambda: _copy_pieces([len(batch)] * (len(plain) // len(batch)), plain, batch)
            ),
        }
        counts = dict(cache.counts)
        del shards, cache
        samples.clear()
    assert counts.get("copied") and not counts.get("source"), counts
    return {name: sum(sizes) / took / 1e9 for name, took in seconds.items()}


def best(work: Callable[[], None]) -> float:
    took = []
    for _ in range(7):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def _copy_samples(samples: list[tuple[Any, int]], batch: memoryview) -> None:
    at = 0
    for shard, number in samples:
        for view in shard[number].values():
            if at + len(view) > len(batch):
                at = 0
            batch[at : at + len(view)] = view
            at += len(view)


def _copy_pieces(sizes: list[int], plain: memoryview, batch: memoryview) -> None:
    at = start = 0
    for size in sizes:
        if at + size > len(batch):
            at = 0
        batch[at : at + size] = plain[start : start + size]
        at, start = at + size, start + size


def resuming(arena: Comparison, rounds: int) -> dict[str, float]:
    """Seconds from a state at 90 % of an epoch to the first batch, for loaders that can resume."""
    seconds: dict[str, list[float]] = {name: [] for name, kind in arena.contenders.items() if kind.resumes}
    for name in seconds:
        arena.let("save", name)
    for _ in range(rounds):
        for name, each in seconds.items():
            each.append(arena.let("resume", name)["first"])
    return {name: statistics.median(each) for name, each in seconds.items()}


def reading(arena: Comparison, rounds: int) -> dict[str, float]:
    """Samples per second, for loaders that read shards or a format of their own."""
    names = [name for name, kind in arena.contenders.items() if kind.resumes or kind.reads_shards]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, each in rates.items():
            each.append(arena.let("lasts", name)["rate"])
    return {name: statistics.median(each) for name, each in rates.items()}


def compare(arena: Comparison, thumbnails: Comparison, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arena.contenders}
    for _ in range(rounds):
        for name in arena.contenders:
            runs[name].append(arena.let("run", name))
    memory = {name: arena.let("start", name, watch=True)["memory"] for name in arena.contenders}
    resumed, found, small = resuming(arena, rounds), resuming(thumbnails, rounds), reading(thumbnails, rounds)
    raw = raw_bytes(arena.data)
    rows = {
        name: {
            "title": arena.contenders[name].title,
            **{part: statistics.median(run[part] for run in each) for part in ("rate", "cpu", "first")},
            "memory": memory[name],
            "resume": resumed.get(name),
            "resume_thumbnails": found.get(name),
            "thumbnails": small.get(name),
            "runs": each,
        }
        for name, each in runs.items()
    }
    return {"contenders": rows, "absent": arena.absent, **raw}


def show(seen: dict[str, Any]) -> None:
    rows = seen["contenders"]
    print(
        f"{'':24} {'img/s':>6} {'of limit':>9} {'CPU/img':>8} {'of limit':>9} {'1st batch':>10} {'memory':>7} "
        f"{'resume: photos':>15} {'thumbnails':>11} {'thumbnails/s':>13}"
    )
    bare = rows["bare"]
    for name, row in rows.items():
        resume = [
            "" if name == "bare" else "cannot" if row[part] is None else f"{row[part]:.3f} s"
            for part in ("resume", "resume_thumbnails")
        ]
        small = "" if row["thumbnails"] is None else f"{row['thumbnails']:.0f}"
        print(
            f"{row['title']:24} {row['rate']:6.0f} {row['rate'] / bare['rate']:9.0%} {row['cpu'] * 1e3:5.2f} ms "
            f"{bare['cpu'] / row['cpu']:9.0%} {row['first']:8.3f} s {row['memory'] / 1e6:4.0f} MB "
            f"{resume[0]:>15} {resume[1]:>11} {small:>13}"
        )
    if seen["absent"]:
        print(f"not here: {', '.join(seen['absent'])} (scripts/make-peers.sh)")
    for name in ("dali", "webdataset", "torchfiles", "streaming", "litdata", "spdl"):
        if name in rows:
            faster, cheaper = (
                rows["headway"]["rate"] / rows[name]["rate"],
                rows[name]["cpu"] / rows["headway"]["cpu"],
            )
            print(
                f"headway / {rows[name]['title']}: {faster:.2f} x the rate; {cheaper:.2f} x for a CPU second"
            )
    for part, what in (("resume", "photos"), ("resume_thumbnails", "thumbnails")):
        others = [row[part] for name, row in rows.items() if row[part] is not None and name != "headway"]
        if others:
            ratio = min(others) / rows["headway"][part]
            print(f"resume, {what}: headway is {ratio:.1f} x as fast as the fastest peer")
    pieces, whole = (seen["sample_gb_s"] / seen[name] for name in ("memcpy_pieces_gb_s", "memcpy_gb_s"))
    print(
        f"sample bytes from the node cache {seen['sample_gb_s']:.1f} GB/s: {pieces:.0%} of memcpy in such pieces, "
        f"{whole:.0%} of memcpy of whole batches"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--thumbnails", type=int, default=300_000, help="samples of the epoch to go on in")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write everything that was seen to this file")
    parser.add_argument("--run_task", nargs=3, metavar=("TASK", "NAME", "DATA"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_task:
        task, name, data = args.run_task
        run_task(task, name, Path(data), args.threads)
    peers = PEERS / "bin" / "python"
    if peers.exists() and Path(sys.prefix).resolve() != PEERS.resolve():
        os.execv(peers, [str(peers), *sys.argv])
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as other:
        make(Path(directory), args.samples)
        make_thumbnails(Path(other), args.thumbnails)
        photos, thumbnails = Comparison(Path(directory), args.threads), Comparison(Path(other), args.threads)
        for kind in photos.contenders.values():
            kind.prepare(Path(directory))
            if kind.resumes:
                kind.prepare(Path(other))
        seen = compare(photos, thumbnails, args.rounds)
        for kind in photos.contenders.values():
            kind.tidy()
    show(seen)
    if args.json:
        args.json.write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
