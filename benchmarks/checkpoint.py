"""How long a save stalls training, and how long until it is on disk: torch.save, torch's DCP, headway.

    python benchmarks/checkpoint.py [--gigabytes 0.1 0.5 1 2] [--repeat 5] [--directory PATH] [--json PATH]
    python benchmarks/checkpoint.py --device cuda --params 1.5e9 --repeat 2 --budget 420 --json results.json

One process. On the CPU: a state of equal float32 tensors. On a CUDA device: a transformer of that many float32
parameters with the state of AdamW, so three times their bytes.

- `stall` is the time until training continues: until the call has returned, and a kernel launched after it has run; for
  DCP with asynchronous staging, until staging is complete.
- `total` is the time until the save is reported as complete.
- `disk` is one sequential write of as many bytes and one fsync. `torch.save` alone syncs nothing; `+ fsync` syncs the
  file and its directory, which a checkpoint needs to survive a power cut. DCP syncs its files, but not the directory.
- `step` is the relative time of a small training step while the save is in flight: 1 means no slowdown.
- The first save of each method, which also allocates memory and starts processes, is shown separately and not counted.

Rounds are interleaved; the table has medians (minimum to maximum). `--budget` limits the seconds; the results so far
are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging

from headway import checkpoint

State = dict[str, Any]
Finish = Callable[[], object]
CHUNK_BYTES = 8 << 20
LAYERS = 48


def done() -> None:
    """Does nothing: the save is complete."""


def sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# --- ways to save: each returns when training may go on, with what waits for the rest


class Disk:
    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes = memoryview(bytearray(os.urandom(1 << 20) * 64))  # 64 MiB, again and again

    def __call__(self, directory: Path, state: State) -> Finish:  # noqa: ARG002
        with (directory / "raw").open("wb", buffering=0) as file:
            for begin in range(0, self._size, CHUNK_BYTES):
                at = begin % len(self._bytes)
                file.write(self._bytes[at : at + min(CHUNK_BYTES, self._size - begin)])
            os.fsync(file.fileno())
        return done


def torch_save(directory: Path, state: State) -> Finish:
    torch.save(state, directory / "state.pt")
    return done


def torch_save_synced(directory: Path, state: State) -> Finish:
    torch.save(state, directory / "state.pt")
    sync(directory / "state.pt", directory)
    return done


def dcp_save(directory: Path, state: State) -> Finish:
    dcp.save(state, checkpoint_id=directory / "dcp")
    return done


def dcp_async(directory: Path, state: State) -> Finish:
    in_flight = dcp.async_save(state, checkpoint_id=directory / "dcp")
    assert isinstance(in_flight, Future)
    return in_flight.result


class DcpStaged:
    """DCP with a reused stager: its buffers are reused; on CUDA they are pinned and filled on another stream."""

    def __init__(self, cuda: bool) -> None:
        self._stager = staging.DefaultStager(staging.StagingOptions(cuda, True, cuda, cuda))

    def __call__(self, directory: Path, state: State) -> Finish:
        in_flight = dcp.async_save(state, checkpoint_id=directory / "dcp", async_stager=self._stager)
        if isinstance(in_flight, Future):
            return in_flight.result
        in_flight.staging_completion.result()
        return in_flight.upload_completion.result

    def close(self) -> None:
        self._stager.close()


def headway_save(directory: Path, state: State) -> Finish:
    checkpoint.save(directory, state, step=1)
    return done


class HeadwayBackground:
    def __init__(self, root: Path) -> None:
        self._directory = root / "headway-background"
        self._saver = checkpoint.Saver(self._directory)
        self._step = 0

    def __call__(self, directory: Path, state: State) -> Finish:
        self._step += 1
        self._saver.save(state, step=self._step)

        def finish() -> None:
            self._saver.wait()
            (self._directory / f"step-{self._step:012d}").rename(directory / "saved")  # removed with it

        return finish

    def close(self) -> None:
        self._saver.close()


# --- measuring


@dataclass
class Row:
    """Times of one method for one state."""

    way: str
    bytes: int
    first_stall: float = math.nan
    stalls: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    step: float = math.nan
    failed: str = ""


class Trainer:
    """A small training step, and its time without a save."""

    def __init__(self, device: str) -> None:
        self._x = torch.rand(256, 256, device=device)
        self.cuda = device == "cuda"
        for _ in range(50):
            self.step()
        begin = time.perf_counter()
        for _ in range(300):
            self.step()
        self.alone = (time.perf_counter() - begin) / 300

    def step(self) -> None:
        for _ in range(4):
            torch.mm(self._x, self._x)
        sum(number * number for number in range(2000))  # the interpreter has work, too
        self.go_on()

    def go_on(self) -> None:
        """Waits until a kernel launched now has run."""
        if self.cuda:
            self._x.add_(0)
            torch.cuda.current_stream().synchronize()

    def while_flying(self, finish: Finish) -> float:
        """Relative time of a step while a save is in flight."""
        from threading import Thread

        waiting = Thread(target=finish)
        waiting.start()
        begin, steps = time.perf_counter(), 0
        while waiting.is_alive():
            self.step()
            steps += 1
        taken = time.perf_counter() - begin
        return taken / steps / self.alone if steps else math.nan


def measure(
    way: Callable[[Path, State], Finish], root: Path, state: State, trainer: Trainer, row: Row
) -> None:
    directory = Path(tempfile.mkdtemp(dir=root))
    os.sync()  # nobody pays for what another left in memory
    trainer.go_on()
    begin = time.perf_counter()
    finish = way(directory, state)
    trainer.go_on()
    stall = time.perf_counter() - begin
    finish()
    if math.isnan(row.first_stall):
        row.first_stall = stall
    else:
        row.stalls.append(stall)
        row.totals.append(time.perf_counter() - begin)
    shutil.rmtree(directory)


def measure_steps(
    way: Callable[[Path, State], Finish], root: Path, state: State, trainer: Trainer, row: Row
) -> None:
    directory = Path(tempfile.mkdtemp(dir=root))
    finish = way(directory, state)
    if finish is not done:
        row.step = trainer.while_flying(finish)
    shutil.rmtree(directory)


def compare(
    root: Path, state: State, options: argparse.Namespace, deadline: float, keep: Callable[[list[Row]], None]
) -> list[Row]:
    cuda = options.device == "cuda"
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))
    ways: dict[str, Callable[[Path, State], Finish]] = {
        "disk": Disk(size),
        "torch.save": torch_save,
        "torch.save + fsync": torch_save_synced,
        "DCP save": dcp_save,
        "DCP async_save": dcp_async,
        **(
            {"DCP async_save, kept": DcpStaged(cuda)} if "DefaultStager" in vars(staging) else {}
        ),  # of newer torch
        "headway save": headway_save,
        "headway background": HeadwayBackground(root),
    }
    chosen = {name: way for name, way in ways.items() if not options.ways or name in options.ways}
    rows = {name: Row(name, size) for name in chosen}
    trainer = Trainer(options.device)
    try:
        for work in [measure] * (1 + options.repeat) + [measure_steps]:
            for name, way in chosen.items():
                if time.monotonic() < deadline and not rows[name].failed:
                    try:
                        work(way, root, state, trainer, rows[name])
                    except Exception as error:  # a failure of a peer is a result
                        if name.startswith("headway"):
                            raise
                        rows[name].failed = repr(error)
                    keep(list(rows.values()))
    finally:
        for way in ways.values():
            if isinstance(way, DcpStaged | HeadwayBackground):
                way.close()
    return list(rows.values())


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors(value)


def flat_state(gigabytes: float) -> State:
    return {"net": {f"layer{n}.weight": torch.rand(int(gigabytes * 1e9 / 4 / 20)) for n in range(20)}}


def transformer_state(params: float, device: str) -> State:
    """Weights of a decoder with 48 layers, and the state of AdamW after one step."""
    width = max(8, round(math.sqrt(params / (12 * LAYERS)) / 8) * 8)
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }
    net = torch.nn.ParameterDict(
        {f"layer{n}_{name}": torch.rand(shape, device=device) for n in range(LAYERS) for name, shape in shapes.items()}
    )  # fmt: skip
    adamw = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    adamw.zero_grad()
    return {"net": dict(net.state_dict()), "adamw": adamw.state_dict()}


def show(rows: list[Row]) -> None:
    size = rows[0].bytes / 1e9
    disk = next((statistics.median(row.totals) for row in rows if row.way == "disk" and row.totals), math.nan)
    print(f"\n{size:.2f} GB, medians of {len(rows[0].totals)}")
    print(
        f"  {'':21} {'first stall':>11} {'stall':>9} {'total':>9} {'':19} {'x disk':>6} {'GB/s':>6} {'step':>6}"
    )
    for row in rows:
        if not row.totals:
            why = f"failed: {row.failed:.80}" if row.failed else "no time left"
            print(f"  {row.way:21} {row.first_stall:9.3f} s   ({why})")
            continue
        stall, total = statistics.median(row.stalls), statistics.median(row.totals)
        spread = f"({min(row.totals):.3f} to {max(row.totals):.3f})"
        step = "" if math.isnan(row.step) else f"{row.step:6.2f}"
        print(
            f"  {row.way:21} {row.first_stall:9.3f} s {stall:7.3f} s {total:7.3f} s {spread:19} "
            f"{total / disk:6.2f} {size / total:6.2f} {step}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[0.1, 0.5, 1.0, 2.0], help="of the state, on the CPU"
    )
    parser.add_argument(
        "--params", type=float, default=None, help="of a transformer with AdamW, on either device"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", nargs="*", default=[], help="only these, by their names in the table")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--directory", type=Path, default=None, help="on the file system to measure")
    parser.add_argument("--json", type=Path, default=None, help="where to write all numbers, as they come")
    options = parser.parse_args()
    if options.device == "cuda" and options.params is None:
        options.params = 1.5e9
    deadline = time.monotonic() + options.budget
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    finished: list[Row] = []

    def keep(rows: list[Row]) -> None:
        if options.json is not None:
            options.json.write_text(
                json.dumps({**machine, "rows": [asdict(row) for row in finished + rows]}, indent=1)
            )

    with tempfile.TemporaryDirectory(dir=options.directory) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it is alone
        for gigabytes in [math.nan] if options.params else options.gigabytes:
            state = (
                transformer_state(options.params, options.device) if options.params else flat_state(gigabytes)
            )
            rows = compare(Path(directory), state, options, deadline, keep)
            show(rows)
            finished += rows


if __name__ == "__main__":
    main()
