"""Compares traced peaks with measured ones on this GPU, for models on which no constant of the planner was fitted.

    python benchmarks/peaks.py [NAME ...]
    python benchmarks/peaks.py --reserved gpt2_124m tv_resnet18     where reserved bytes come from

Traces run on the CPU during the measurements, so that times are not meaningful. With --reserved, the allocations of a
real run are replayed by the planner's model of the allocator: if that gives what was reserved, the model is right, and
what differs is the sequence; the sizes that one of the two sequences has more often in its last step are listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "plan"))

from truth import h200_settings

from headway.errors import HeadwayError
from headway.plan.tracer.measurement import measure_module
from headway.plan.tracer.process.allocator import replay
from headway.plan.tracer.settings import TraceSettings

TESTS = Path(__file__).parent.parent / "tests" / "plan"
GPT2 = "gpt2_124m"
"""GPT-2 with 32 sequences, whose traced and measured reserved bytes differed by 18 %."""
STEPS, LISTED = 4, 8
Events = list[tuple[int, int]]


def settings(name: str) -> TraceSettings:
    if name == GPT2:
        return replace(h200_settings(0), batch_size=32)
    from strangers import MODELS, NAMES  # imports torch

    stranger = MODELS[name]
    return TraceSettings(
        factory=f"{TESTS / 'strangers.py'}:make",
        inputs=stranger.batch.__name__,
        loss=stranger.loss,
        batch_size=stranger.size,
        arguments={"which": NAMES.index(name)},
    )


def line(name: str) -> str:
    try:
        found = measure_module(settings(name), steps=3).rows[0]
    except HeadwayError as error:
        return f"| {name} | {settings(name).batch_size} | {error} |"
    assert found.measured_allocated and found.measured_reserved
    reserved = found.predicted_reserved / found.measured_reserved - 1
    size = found.measured_allocated / 2**20
    batch = settings(name).batch_size
    return f"| {name} | {batch} | {size:,.0f} MiB | {found.memory_error:+.2%} | {reserved:+.2%} |"


# where reserved bytes come from


def history_events(entries: Iterable[Mapping[str, Any]], live: Mapping[int, int] | None = None) -> Events:
    """What torch recorded as the planner's allocator takes it: each allocation has a number, and `live` come first."""
    events: Events = []
    held: dict[int, tuple[int, int]] = {}
    numbers = count()

    def allocate(address: int, requested: int) -> None:
        held[address] = (next(numbers), -(-max(1, requested) // 512) * 512)
        events.append(held[address])

    for address, size in (live or {}).items():
        allocate(address, size)
    for entry in entries:
        if entry["action"] == "alloc":
            allocate(entry["addr"], entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in held:
            number, size = held.pop(entry["addr"])
            events.append((number, -size))
    return events


def live_blocks(segments: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Addresses and sizes of what is allocated in a snapshot."""
    found = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[address] = block["requested_size"]
            address += block["size"]
    return found


def differences(traced: Sequence[tuple[int, int]], measured: Sequence[tuple[int, int]]) -> list[Any]:
    """Sizes, and how often the traced and the measured sequence allocates them, where they differ; most bytes first."""
    ours, theirs = (Counter(size for _, size in events if size > 0) for events in (traced, measured))
    sizes = [size for size in ours | theirs if ours[size] != theirs[size]]
    sizes.sort(key=lambda size: -size * abs(ours[size] - theirs[size]))
    return [(size, ours[size], theirs[size]) for size in sizes]


def measure_history(name: str) -> dict[str, Any]:
    """Runs the model on the GPU in this process: its allocations, where the last step begins, and what is reserved."""
    import torch

    from headway.plan.tracer.probe import steps

    chosen = settings(name)
    model, batch, loss = steps._build(_complete(chosen), chosen.batch_size, torch.device("cuda"))
    optimizer = steps.make_optimizer(chosen, model.parameters())
    live = live_blocks(torch.cuda.memory._snapshot()["segments"])
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None)
    last = len(live)
    for _ in range(STEPS):
        last = len(history_events(torch.cuda.memory._snapshot()["device_traces"][0], live))
        steps._step(chosen, model, batch, loss, optimizer, synchronize=True)
    events = history_events(torch.cuda.memory._snapshot()["device_traces"][0], live)
    return {"events": events, "last": last, "reserved": torch.cuda.max_memory_reserved()}


def trace_history(name: str) -> dict[str, Any]:
    """Traces the model in this process: its allocations, and where the last step begins."""
    from headway.plan.tracer.process import cuda_emulation
    from headway.plan.tracer.process.step import StepTracer

    rules = cuda_emulation.install()
    step = StepTracer(_complete(settings(name)))
    step.run()
    del rules
    events = [tuple(event) for event in step.meter.events]
    reserved = replay(events, built=step.built_at, start=step.measured_from)[1]
    return {"events": events, "last": step.measured_from, "reserved": reserved}


def _complete(chosen: TraceSettings) -> TraceSettings:
    """Names the file of the inputs, as a request for a trace does."""
    return replace(chosen, inputs=f"{chosen.factory.rpartition(':')[0]}:{chosen.inputs}")


def explain_reserved(name: str) -> None:
    """Prints reserved bytes as measured, as replayed from the measured allocations, and as traced."""
    found = {}
    for kind in ("measured", "traced"):
        command = [sys.executable, __file__, "--history", kind, name]
        found[kind] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    measured, traced = found["measured"], found["traced"]
    replayed = replay([tuple(event) for event in measured["events"]], built=0, start=0)[1]
    cells = [
        f"{size / 2**20:,.0f} MiB ({size / measured['reserved'] - 1:+.1%})"
        for size in (replayed, traced["reserved"])
    ]
    print(f"| {name} | {measured['reserved'] / 2**20:,.0f} MiB | {cells[0]} | {cells[1]} |", flush=True)
    ends = [run["events"][run["last"] :] for run in (traced, measured)]
    for size, ours, theirs in differences(*ends)[:LISTED]:
        print(f"    {size / 2**20:12,.3f} MiB: {ours} traced, {theirs} measured", flush=True)


def main() -> None:
    from strangers import NAMES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=[*NAMES, GPT2], help=f"models of tests/plan/strangers.py, or {GPT2}"
    )
    parser.add_argument(
        "--reserved", action="store_true", help="compare the allocations of a run with the traced ones"
    )
    parser.add_argument("--history", choices=("measured", "traced"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.history:
        make = measure_history if options.history == "measured" else trace_history
        print(json.dumps(make(options.names[0])))
    elif options.reserved:
        print("| model | reserved | measured allocations replayed | traced |\n|---|---|---|---|")
        for name in options.names:
            explain_reserved(name)
    else:
        print(
            "| model | batch | peak allocated | traced, allocated | traced, reserved |\n|---|---|---|---|---|"
        )
        with ThreadPoolExecutor(5) as pool:
            for text in pool.map(line, options.names):
                print(text, flush=True)


if __name__ == "__main__":
    main()
