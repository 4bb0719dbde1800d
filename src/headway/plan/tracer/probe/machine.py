"""Measures this machine in under a minute: products, copies, attention, launches, transfers, storage, collectives."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as functional
from torch.utils._pytree import tree_leaves

from headway.plan.tracer.process.user_code import load_function

_SHAPES = (
    (8192, 8192, 8192), (8192, 2304, 768), (8192, 768, 3072), (8192, 11264, 2048),
    (8192, 2048, 5632), (4096, 4096, 4096), (2048, 2048, 2048), (16384, 4096, 4096),
)  # fmt: skip
_CPU_SHAPES = ((512, 512, 512), (1024, 1024, 1024), (256, 1024, 4096))
_STORAGE_BYTES = 256 << 20
_LOADER_S = 5.0


def measure_machine(directory: Path, loader: str | None) -> dict[str, Any]:
    """Measures everything that `Calibration` and `Node` use, as far as the machine has it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = _device(device) | _arithmetic(device) | _storage(directory)
    if device.type == "cuda":
        found |= _transfers() | {"collectives": _collectives()}
    if loader is not None:
        found["loader_bytes_per_s"] = _loader(load_function(loader)())
    return found


def _loader(batches: Iterable[Any]) -> float:
    """Bytes per second that the user's own loader delivers, after its first batch."""
    iterator = iter(batches)
    next(iterator)  # the first batch includes the start of the workers
    start, size = time.perf_counter(), 0
    for batch in iterator:
        size += sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        if time.perf_counter() - start > _LOADER_S:
            break
    return size / (time.perf_counter() - start)


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        memory = psutil.virtual_memory().total
        return {
            "device": "cpu",
            "gpus": 1,
            "memory_bytes": memory,
            "context_bytes": 0,
            "torch": torch.__version__,
        }
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info()
    return {
        "device": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_bytes": total,
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "torch": torch.__version__,
    }


def _arithmetic(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    products = {}
    for m, k, n in _SHAPES if gpu else _CPU_SHAPES:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        seconds = _timed(partial(torch.matmul, a, b), device)
        products[f"{m}x{k}x{n}"] = 2 * m * k * n / seconds / 1e12
    source = torch.empty(1 << (30 if gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _timed(lambda: target.copy_(source), device)
    tokens, heads = (4096, 16) if gpu else (512, 4)
    q = torch.randn(2, heads, tokens, 128, device=device, dtype=dtype)
    attention = _timed(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True), device)
    return {
        "products_TFLOPS": products,
        "copy_bytes_per_s": copied,
        "attention_TFLOPS": 2 * heads * tokens * tokens * 128 * 2 * 2 / 2 / attention / 1e12,
        "launch_s": _launch(device),
    }


def _launch(device: torch.device) -> float:
    """Seconds that the host takes per small eager operation."""
    x = torch.zeros(1, device=device)
    return _timed(lambda: [x.add_(1) for _ in range(200)], device) / 200


def _transfers() -> dict[str, Any]:
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.device("cuda")
    target = torch.empty_like(host, device=device)
    seconds = _timed(lambda: target.copy_(host, non_blocking=True), device)
    return {"host_to_device_bytes_per_s": host.numel() / seconds}


def _storage(directory: Path) -> dict[str, Any]:
    """Measures a write with fsync, and a read that the page cache may serve."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="headway-probe-") as file:
        start = time.perf_counter()
        for _ in range(_STORAGE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = _STORAGE_BYTES / (time.perf_counter() - start)
        start = time.perf_counter()
        with Path(file.name).open("rb") as reader:
            while reader.read(1 << 22):
                pass
        read = _STORAGE_BYTES / (time.perf_counter() - start)
    return {"storage_write_bytes_per_s": written, "storage_read_cached_bytes_per_s": read}


def _collectives() -> dict[str, float]:
    """Seconds of an all-reduce between this machine's GPUs, by bytes. Empty with one GPU."""
    ranks = torch.cuda.device_count()
    if ranks == 1:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "times"
        rendezvous = f"file://{directory}/rendezvous"
        torch.multiprocessing.spawn(_time_collectives, args=(ranks, rendezvous, str(out)), nprocs=ranks)  # type: ignore[no-untyped-call]
        lines = [line.split() for line in out.read_text().splitlines()]
    return {size: float(seconds) for size, seconds in lines}


def _time_collectives(rank: int, ranks: int, rendezvous: str, out: str) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=ranks)
    lines = []
    for size in (1 << 20, 16 << 20, 256 << 20):
        data = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        lines.append(f"{size} {_timed(partial(dist.all_reduce, data), torch.device('cuda'))}")
    if rank == 0:
        Path(out).write_text("\n".join(lines))
    dist.destroy_process_group()


def _timed(work: Callable[[], object], device: torch.device, *, repeats: int = 7) -> float:
    """Median seconds of a call, after two warm-up calls."""
    times = []
    for turn in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return median(times)
