"""How long training stands still for a save, and how long until it is on disk: torch.save, torch's DCP, headway.

    python benchmarks/checkpoint.py [--gigabytes 0.1 0.5 1 2] [--repeat 5] [--folder PATH] [--json PATH]
    python benchmarks/checkpoint.py --device cuda --params 1.5e9 --repeat 2 --budget 420 --json results.json

One process. On the CPU: a state of equal float32 tensors. On a CUDA device: a transformer of that many float32
parameters with the state of AdamW, so three times their bytes.

- `stall` is the time until training may go on: until the call has returned, and a kernel that was launched after it has
  run; for DCP with asynchronous staging, until staging is complete.
- `total` is the time until the save says that it is done.
- `disk` is one sequential write of as many bytes and one fsync. `torch.save` syncs nothing by itself; `+ fsync` adds
  the sync of the file and of its folder that a checkpoint needs to survive a power cut. DCP syncs its files, but not
  their names.
- `step` is how much longer a small step of training takes while the save is in flight: 1 is not at all.
- The first save of each way, which also makes memory and processes, is shown apart and not counted.

Rounds are interleaved; medians (smallest to largest). `--budget` ends it after so many seconds with what is known.
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
PIECE = 8 << 20
LAYERS = 48


def done() -> None:
    """There is nothing left to wait for."""


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

    def __call__(self, folder: Path, state: State) -> Finish:  # noqa: ARG002
        with (folder / "raw").open("wb", buffering=0) as file:
            for begin in range(0, self._size, PIECE):
                at = begin % len(self._bytes)
                file.write(self._bytes[at : at + min(PIECE, self._size - begin)])
            os.fsync(file.fileno())
        return done


def torch_save(folder: Path, state: State) -> Finish:
    torch.save(state, folder / "state.pt")
    return done


def torch_save_synced(folder: Path, state: State) -> Finish:
    torch.save(state, folder / "state.pt")
    sync(folder / "state.pt", folder)
    return done


def dcp_save(folder: Path, state: State) -> Finish:
    dcp.save(state, checkpoint_id=folder / "dcp")
    return done


def dcp_async(folder: Path, state: State) -> Finish:
    flying = dcp.async_save(state, checkpoint_id=folder / "dcp")
    assert isinstance(flying, Future)
    return flying.result


class DcpStaged:
    """DCP with a stager that is kept: its buffers are used again; on CUDA they are pinned, and filled on the side."""

    def __init__(self, cuda: bool) -> None:
        self._stager = staging.DefaultStager(staging.StagingOptions(cuda, True, cuda, cuda))

    def __call__(self, folder: Path, state: State) -> Finish:
        flying = dcp.async_save(state, checkpoint_id=folder / "dcp", async_stager=self._stager)
        if isinstance(flying, Future):
            return flying.result
        flying.staging_completion.result()
        return flying.upload_completion.result

    def close(self) -> None:
        self._stager.close()


def headway_save(folder: Path, state: State) -> Finish:
    checkpoint.save(folder, state, step=1)
    return done


class HeadwayBackground:
    def __init__(self, root: Path) -> None:
        self._folder = root / "headway-background"
        self._saver = checkpoint.Saver(self._folder)
        self._step = 0

    def __call__(self, folder: Path, state: State) -> Finish:
        self._step += 1
        self._saver.save(state, step=self._step)

        def finish() -> None:
            self._saver.wait()
            (self._folder / f"step-{self._step:012d}").rename(folder / "saved")  # removed with it

        return finish

    def close(self) -> None:
        self._saver.close()


# --- measuring


@dataclass
class Row:
    """What one way took for one state."""

    way: str
    bytes: int
    first_stall: float = math.nan
    stalls: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    step: float = math.nan
    failed: str = ""


class Trainer:
    """A small step of training; how long it takes undisturbed."""

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
        """Returns when a kernel that is launched now has run."""
        if self.cuda:
            self._x.add_(0)
            torch.cuda.current_stream().synchronize()

    def while_flying(self, finish: Finish) -> float:
        """How much longer steps take while a save is in flight."""
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
    folder = Path(tempfile.mkdtemp(dir=root))
    os.sync()  # nobody pays for what another left in memory
    trainer.go_on()
    begin = time.perf_counter()
    finish = way(folder, state)
    trainer.go_on()
    stall = time.perf_counter() - begin
    finish()
    if math.isnan(row.first_stall):
        row.first_stall = stall
    else:
        row.stalls.append(stall)
        row.totals.append(time.perf_counter() - begin)
    shutil.rmtree(folder)


def measure_steps(
    way: Callable[[Path, State], Finish], root: Path, state: State, trainer: Trainer, row: Row
) -> None:
    folder = Path(tempfile.mkdtemp(dir=root))
    finish = way(folder, state)
    if finish is not done:
        row.step = trainer.while_flying(finish)
    shutil.rmtree(folder)


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
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
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

    with tempfile.TemporaryDirectory(dir=options.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it is alone
        for gigabytes in [math.nan] if options.params else options.gigabytes:
            state = (
                transformer_state(options.params, options.device) if options.params else flat_state(gigabytes)
            )
            rows = compare(Path(folder), state, options, deadline, keep)
            show(rows)
            finished += rows


if __name__ == "__main__":
    main()
