"""Batches on their way to a GPU: whole when training reads them, and nobody waits or allocates once it runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import headway as hw
from headway.data.feed.device_feed import DeviceFeed
from headway.data.feed.nested import find_tensors
from headway.data.images.device.availability import missing_for_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = 2**26  # values of 4 bytes: their copy takes milliseconds
LONG = 2 * 10**7  # cycles of the GPU, about ten milliseconds
STEPS, FIRST, LAST = 60, 30, 50
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost")


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    hw.dist.leave()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_batch_is_whole_when_the_current_stream_reads_it() -> None:
    feed = DeviceFeed(device())
    host = torch.randint(0, 1000, (LARGE,), dtype=torch.int32)
    expected = host.clone()
    for _ in range(3):
        batch = feed.move({"x": (host, ["name", host[:7].double()])})
        copy, small = batch["x"][0].clone(), batch["x"][1][1].clone()  # at once, while it is being copied
        host.zero_()  # the loader uses its memory again
        assert torch.equal(copy.cpu(), expected) and torch.equal(small.cpu(), expected[:7].double())
        assert batch["x"][1][0] == "name"
        host.copy_(expected)


def test_a_small_batch_waits_for_nothing_that_the_device_computes() -> None:
    feed, host = DeviceFeed(device()), torch.arange(2**14, dtype=torch.int32)  # 64 KiB, not pinned
    expected, before = host.clone(), torch.cuda.Event()
    feed.move(host)  # what is done once
    for _ in range(8):
        torch.cuda._sleep(10 * LONG)
        before.record()
        moved, part = feed.move((host, host[::2]))
        host.zero_()  # the loader uses its memory again
        assert not before.query(), "the host was back while the device still computed"
        assert torch.equal(moved.cpu(), expected) and torch.equal(part.cpu(), expected[::2])
        host.copy_(expected)


def test_memory_is_not_used_again_while_the_current_stream_reads_it() -> None:
    feed, results = DeviceFeed(device()), list[Tensor]()
    for number in range(6):
        batch = feed.move(torch.full((LARGE // 8,), number, dtype=torch.int32))
        torch.cuda._sleep(LONG)
        results.append(batch.float().mean())  # reads it much later
        del batch
    assert torch.stack(results).tolist() == list(range(6))


class Watched(hw.TrainValStage):
    """Trains on some mean of each batch, and traces what CUDA is asked for in the steps from FIRST to LAST."""

    trace: Path
    begun: Any = None
    memory: tuple[int, int] = 0, 0

    def step(self, batch: Any) -> Tensor:
        step = self.pipe.steps_done
        if step == FIRST:
            torch.cuda.synchronize()
            self.memory = self.allocated()
            self.begun = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
            self.begun.start()
        with torch.profiler.record_function(f"step {step}"):
            means = [part.float().mean() for part in find_tensors(batch) if part.is_floating_point()]
            loss = self.models["net"](torch.stack(means).mean().reshape(1, 1)).square().mean()
        if step == LAST:
            self.begun.stop()
            self.begun.export_chrome_trace(str(self.trace))
            self.grown = tuple(now - then for now, then in zip(self.allocated(), self.memory, strict=True))
        return loss

    @staticmethod
    def allocated() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["num_device_alloc"], stats["reserved_bytes.all.current"]


def train_on(dataset: Any, tmp_path: Path) -> Watched:
    tmp_path.mkdir(exist_ok=True)
    pipe = hw.Pipeline(name="feed", root=tmp_path / "runs")
    pipe.register_model("net", nn.Linear(1, 1))
    pipe.register_optimizer("sgd", lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    pipe.register_dataset("train", dataset)
    stage = Watched(log_every=10**6)
    stage.trace = tmp_path / "trace.json"
    pipe.append_stage(stage, max_steps=STEPS)
    pipe.run()
    return stage


def calls(trace: Path) -> list[dict[str, Any]]:
    """What CUDA's runtime was asked for within the traced steps."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted(
        (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("cat") == "user_annotation" and each["name"].startswith("step ")
    )
    assert len(steps) >= LAST - FIRST
    begin, end = steps[1][0], steps[-2][1]  # the profiler itself waits when it starts and stops
    return [
        each
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= each["ts"] <= end
    ]


def check_steady(stage: Watched, *, may_pin: int = 0) -> None:
    """Nothing waits and nothing is allocated, but what torch's own thread may pin while its cache still fills."""
    found, main = calls(stage.trace), threading.get_native_id()
    pinned = [each for each in found if each["name"] == "cudaHostAlloc" and each["tid"] != main]
    assert len(pinned) <= may_pin
    assert any("Launch" in each["name"] for each in found), "the trace shows the calls of CUDA"
    steady = {
        "the thread that trains waits": [
            each["name"] for each in found if each["name"] in WAITS and each["tid"] == main
        ],
        "allocations": [
            each["name"] for each in found if each["name"].startswith(ALLOCATIONS) and each not in pinned
        ],
        "allocations, and bytes that torch holds": stage.grown,
    }
    assert steady == {
        "the thread that trains waits": [],
        "allocations": [],
        "allocations, and bytes that torch holds": (0, 0),
    }


def test_batches_of_any_loader_make_nobody_wait(tmp_path: Path) -> None:
    batches = [{"x": torch.randn(64, 3, 64, 64), "y": (torch.arange(64), ["name"])} for _ in range(8)]
    check_steady(train_on(batches * 8, tmp_path))


def test_batches_of_workers_make_nobody_wait(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(4096, 3, 32, 32), torch.arange(4096))
    loader = hw.data.DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
    # two tensors in each batch that may be on its way: two for each worker, one in the queue, two in training
    check_steady(train_on(loader, tmp_path), may_pin=2 * 7)
    assert not loader._torch.pin_memory, "outside of the pipeline it is as it was"


@pytest.mark.skipif(bool(missing_for_gpu()), reason=f"needs the GPU's path: {missing_for_gpu()}")
def test_shards_with_crops_on_the_gpu_make_nobody_wait(tmp_path: Path) -> None:
    import simplejpeg

    rng = np.random.default_rng(0)
    photos = [rng.integers(0, 255, (96, 120, 3), dtype=np.uint8) for _ in range(8)]
    samples = (
        {"__key__": f"{n:04d}", "jpg": simplejpeg.encode_jpeg(photos[n % 8]), "cls": n} for n in range(512)
    )
    hw.data.pack(samples, tmp_path / "shards", shard_size=2**24)
    how: dict[str, Any] = {"batch_size": 32, "steps_per_epoch": 1000}
    crops = hw.data.MultiCrop(global_size=64, local_size=32)
    on_gpu = hw.data.ShardLoader(tmp_path / "shards", transform=crops, device="cuda", **how)
    check_steady(train_on(on_gpu, tmp_path / "gpu"))
    on_cpu = hw.data.ShardLoader(tmp_path / "shards", transform=crops, **how)
    check_steady(train_on(on_cpu, tmp_path / "cpu"))
