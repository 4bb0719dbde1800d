"""Compares the planner with published measurements, and with other tools on the same rows.

    python benchmarks/plan.py             all but the traces (seconds)
    python benchmarks/plan.py --trace     also the eight H200 peaks (a minute)
    python benchmarks/plan.py --fit       also repeats the fit on other choices of ten rows

Prints Markdown. Speed depends on this machine; errors do not.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "plan"))

import published
from truth import FITTED_ROWS, Measured, h200_rows, korthikanti, torchtitan, vtrain

from headway.plan import Calibration, Layout, Node, preset, search
from headway.plan.cost.memory import peak, reserve_factor
from headway.plan.cost.steptime import step_time
from headway.plan.machine.efficiency import default_calibration
from headway.plan.report.bounds import time_bounds

DGX, VTRAIN = Node("dgx-a100"), Node("a100-sxm8")
FITTED = (
    "matrix",
    "attention",
    "memory",
    "kernel_s",
    "peer",
    "peer_latency_s",
    "network",
    "network_latency_s",
)
# where the fit starts: the catalog's achievable figures, rounded, and the limits that links were measured at
START = Calibration(
    matrix=0.85, attention=0.6, memory=1.0, kernel_s=8e-6, peer=0.75, peer_latency_s=10e-6, network=0.75,
    network_latency_s=25e-6,
)  # fmt: skip
LIMITS = {"matrix": 1.0, "attention": 1.0, "memory": 1.0, "peer": 0.78, "network": 0.95}


# the families of published.yaml: where their fit starts, and what is fitted. The start is that of A100 except for what
# was measured on one H200: the part of a product's traffic that is not hidden, and attention.
HOPPER = replace(
    Calibration(), matrix=0.8, matrix_fp8=0.8, experts=0.45, serial=0.5, attention=0.46, fused_attention=0.65,
    attention_backward=3.0, jitter=0.015,
)  # fmt: skip
FAMILIES = {
    "hopper": (HOPPER, ("matrix", "matrix_fp8", "experts", "fused_attention", "attention", "jitter")),
    # attention is not fitted: products at the best product's rate, and exponentials beside them
    "blackwell": (
        replace(HOPPER, matrix=0.85, matrix_fp8=0.85, attention=0.73, fused_attention=1.0),
        ("matrix", "matrix_fp8", "experts"),
    ),
}
LIMITS |= dict.fromkeys(("matrix_fp8", "experts", "fused_attention"), 1.0)
RIDGE = 0.02
"""How strongly a fitted constant is held at its start: with few rows one of them must not move it far."""


def seconds(row: Measured, constants: Calibration, node: Node = VTRAIN) -> float:
    return step_time(row.model, row.layout, node, constants).total


def mape(rows: Iterable[Measured], constants: Calibration) -> float:
    return mean(abs(seconds(row, constants) / row.seconds - 1) for row in rows)


def fit(rows: Sequence[Measured], *, ridge: float = 0.0) -> Calibration:
    """Eight constants by coordinate search on the mean absolute log error."""

    def loss(constants: Calibration) -> float:
        error = mean(abs(math.log(seconds(row, constants) / row.seconds)) for row in rows)
        return error + ridge * sum(math.log(getattr(constants, n) / getattr(START, n)) ** 2 for n in FITTED)

    best, least, step = START, loss(START), dict.fromkeys(FITTED, 0.3)
    for _ in range(25):
        for name in FITTED:
            for sign in (1, -1):
                value = getattr(best, name) * math.exp(sign * step[name])
                if value > LIMITS.get(name, math.inf):
                    continue
                other = replace(best, **{name: value})
                if (now := loss(other)) < least - 1e-9:
                    best, least = other, now
                    break
            else:
                step[name] *= 0.6
    return best


def step_s(row: published.Row, constants: Calibration) -> float:
    return step_time(row.model, row.layout, row.node, constants).total


def fit_family(rows: Sequence[published.Row], start: Calibration, names: Sequence[str]) -> Calibration:
    """A few constants by coordinate search on the mean absolute log error, held near their start."""

    def loss(constants: Calibration) -> float:
        error = mean(abs(math.log(step_s(row, constants) / row.seconds)) for row in rows)
        return error + RIDGE * sum(math.log(getattr(constants, n) / getattr(start, n)) ** 2 for n in names)

    best, least, step = start, loss(start), dict.fromkeys(names, 0.2)
    for _ in range(12):
        for name in names:
            for sign in (1, -1):
                value = getattr(best, name) * math.exp(sign * step[name])
                other = replace(best, **{name: value})
                if value <= LIMITS.get(name, math.inf) and (now := loss(other)) < least - 1e-9:
                    best, least = other, now
                    break
            else:
                step[name] *= 0.5
    return best


def scores(rows: Sequence[published.Row], constants: Calibration | None = None) -> list[str]:
    """Number of rows, mean absolute error, median bias, and the share of rows inside their interval."""
    errors, inside = [], 0
    for row in rows:
        used = constants or default_calibration(row.node.device)
        step = step_time(row.model, row.layout, row.node, used)
        bounds = time_bounds(row.model, row.layout, row.node, default_calibration(row.node.device), step)
        inside += bounds.low * step.total <= row.seconds <= bounds.high * step.total
        errors.append(step.total / row.seconds - 1)
    bias, coverage = median(errors), inside / len(rows)
    return [str(len(rows)), f"{mean(map(abs, errors)):.1%}", f"{bias:+.1%}", f"{coverage:.0%}"]


def published_steps() -> None:
    """The table of errors: rows of the fit, rows beside it, and each source by constants that never saw it."""
    head = ["rows", "n", "MAPE", "median bias", "inside the interval"]
    found = []
    for family, (start, names) in FAMILIES.items():
        rows = [row for row in published.rows() if row.family == family]
        fitted, aside = rows[::2], rows[1::2]
        constants = fit_family(fitted, start, names)
        print(f"\n{family}: " + ", ".join(f"{name} {getattr(constants, name):.3f}" for name in names))
        found.append([f"{family}: fitted (every second row)", *scores(fitted, constants)])
        found.append([f"{family}: set aside", *scores(aside, constants)])
        for kind in sorted({row.kind for row in rows}):
            found.append([f"{family}: {kind}", *scores([row for row in rows if row.kind == kind])])
        sources = sorted({row.source for row in rows})
        for source in sources if len(sources) > 1 else ():
            others = fit_family([row for row in rows if row.source != source], start, names)
            own = [row for row in rows if row.source == source]
            found.append([f"{family}: {source}, fitted without it", *scores(own, others)])
    ampere = [row for row in published.rows() if row.family == "ampere"]
    found.append(["ampere: llm-foundry, never fitted", *scores(ampere)])
    held_out = published.rows(held_out=True)
    found.append(["blackwell: read after all constants were fixed", *scores(held_out)])
    table("Published steps", head, found)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    a, b = ({i: r for r, i in enumerate(sorted(range(len(v)), key=v.__getitem__))} for v in (left, right))
    n = len(left)
    return 1 - 6 * sum((a[i] - b[i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def regret(rows: Sequence[Measured], constants: Calibration) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        picked = min(mine, key=lambda row: seconds(row, constants))
        found[name] = picked.seconds / min(row.seconds for row in mine) - 1
    return found


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def layouts_on_a_cluster() -> None:
    rows, constants = vtrain(), Calibration()
    held = [row for index, row in enumerate(rows) if index not in FITTED_ROWS]
    picks = regret(rows, constants)
    rank = spearman([seconds(row, constants) for row in rows], [row.seconds for row in rows])
    lost = ", ".join(f"{name} B {value:.1%}" for name, value in picks.items())
    table(
        "109 layouts measured on A100 (vTrain)",
        ["tool", "MAPE", "Spearman", "regret of its pick"],
        [
            ["dlcalc 0.2.0", "54.5 %", "0.80", "27.5, 4.5, 4.7, 0.0 %"],
            ["Calculon", "15.3 %", "0.89", "0.0, 4.5, 0.0, 0.6 %"],
            ["headway, before any fit", f"{mape(rows, START):.1%}", "", ""],
            [
                "headway, the 99 rows it was not fitted on",
                f"{mape(held, constants):.1%}",
                f"{rank:.2f}",
                lost,
            ],
        ],
    )


def other_choices_of_rows() -> None:
    rows, chance = vtrain(), random.Random(0)
    errors = []
    for _ in range(12):
        chosen = set(chance.sample(range(len(rows)), 10))
        constants = fit([rows[i] for i in chosen], ridge=0.01)
        errors.append(mape([row for i, row in enumerate(rows) if i not in chosen], constants))
    print(
        f"\nTwelve random choices of ten rows: {mean(errors):.1%} on the other 99 (best {min(errors):.1%}, ",
        end="",
    )
    print(f"worst {max(errors):.1%}).")
    for name in dict.fromkeys(row.name for row in rows):
        others = [row for row in rows if row.name != name]
        constants = fit(others[:: max(1, len(others) // 10)][:10], ridge=0.01)
        print(
            f"Fitted without {name} B, tested on it: {mape([r for r in rows if r.name == name], constants):.1%}"
        )


def steps_in_papers() -> None:
    rows = []
    for row in korthikanti():
        guess = seconds(row, Calibration(), DGX)
        rows.append([row.name, f"{row.seconds:.2f} s", f"{guess:.2f} s", f"{guess / row.seconds - 1:+.1%}"])
    table("Korthikanti et al. 2022, table 5", ["run", "published", "headway", "error"], rows)


def memory_of_torchtitan() -> None:
    rows = []
    for model, layout, reported in torchtitan():
        guess = peak(model, layout).allocated * reserve_factor(layout).value / 2**30
        what = f"{model.name} {layout.describe()}{' compiled' if layout.compiled else ''}"
        rows.append([what, f"{reported} GiB", f"{guess:.1f} GiB", f"{guess / reported - 1:+.1%}"])
    table("torchtitan on H100, memory by closed forms", ["run", "published", "headway", "error"], rows)


def traced_peaks() -> None:
    from test_trace import settings

    from headway.plan.tracer.request import trace_modules

    facts = h200_rows()
    rows = []
    for row, found in zip(facts, trace_modules([settings(i) for i in range(len(facts))]), strict=True):
        allocated, reserved = (
            found.allocated / row["peak_bytes"] - 1,
            found.reserved / row["reserved_bytes"] - 1,
        )
        rows.append(
            [row["name"], f"{row['peak_bytes'] / 2**20:,.0f} MiB", f"{allocated:+.2%}", f"{reserved:+.2%}"]
        )
    table("Peaks on one H200, traced without a GPU", ["model", "measured", "allocated", "reserved"], rows)


def speed() -> None:
    start = time.perf_counter()
    found = search(preset("gpt3-175b"), DGX, gpus=1536, global_batch=9216, base=Layout(flash=False))
    took = time.perf_counter() - start
    command = [
        sys.executable,
        "-c",
        "import sys; from headway.cli.plan import main; sys.exit(main(sys.argv[1:]))",
    ]
    command += ["preset", "gpt2", "--json"]
    starts = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        starts.append(time.perf_counter() - begin)
    table(
        "Speed here",
        ["what", "seconds"],
        [
            [f"search of {found.tried:,} layouts ({found.fitting:,} fit)", f"{took:.2f}"],
            ["`headway plan preset gpt2`, best of five", f"{min(starts):.2f}"],
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    published_steps()
    layouts_on_a_cluster()
    if options.fit:
        other_choices_of_rows()
    steps_in_papers()
    memory_of_torchtitan()
    if options.trace:
        traced_peaks()
    speed()


if __name__ == "__main__":
    main()
