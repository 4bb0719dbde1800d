"""Compares traced peaks with measured ones on this GPU, for models on which no constant of the planner was fitted.

    python benchmarks/peaks.py [NAME ...]

Traces run on the CPU during the measurements, so that times are not meaningful.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "plan"))

from strangers import MODELS, NAMES

from headway.errors import HeadwayError
from headway.plan.tracer.measurement import measure_module
from headway.plan.tracer.settings import TraceSettings

FILE = Path(__file__).parent.parent / "tests" / "plan" / "strangers.py"


def settings(name: str) -> TraceSettings:
    stranger = MODELS[name]
    return TraceSettings(
        factory=f"{FILE}:make",
        inputs=stranger.batch.__name__,
        loss=stranger.loss,
        batch_size=stranger.size,
        arguments={"which": NAMES.index(name)},
    )


def line(name: str) -> str:
    try:
        found = measure_module(settings(name), steps=3).rows[0]
    except HeadwayError as error:
        return f"| {name} | {MODELS[name].size} | {error} |"
    assert found.measured_allocated and found.measured_reserved
    reserved = found.predicted_reserved / found.measured_reserved - 1
    size = found.measured_allocated / 2**20
    return f"| {name} | {MODELS[name].size} | {size:,.0f} MiB | {found.memory_error:+.2%} | {reserved:+.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=NAMES, help="models of tests/plan/strangers.py; all if not given"
    )
    names = parser.parse_args().names
    print("| model | batch | peak allocated | traced, allocated | traced, reserved |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(5) as pool:
        for text in pool.map(line, names):
            print(text, flush=True)


if __name__ == "__main__":
    main()
