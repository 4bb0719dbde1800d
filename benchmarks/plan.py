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
from fitting import FAMILIES, GOAL_BIAS, GOAL_INSIDE, GOAL_MAPE, Score, fit_family, score, step_s
from truth import FITTED_ROWS, Measured, h200_rows, h200_settings, korthikanti, torchtitan, vtrain

from headway.plan import Calibration, Layout, Node, estimate, preset, search
from headway.plan.cost.memory import closed_form_error, peak, reserve_factor
from headway.plan.cost.steptime import step_time

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


FAMILY_NAMES = ("hopper", "blackwell", "ampere")


def published_steps() -> None:
    """The tables of errors: rows of the fit and rows beside it, and each source by constants that never saw it."""
    apart = []
    for family in FAMILY_NAMES:
        own = published.groups(family)
        if family in FAMILIES:
            print_constants(family, fit_family(family, own.fitted))
            apart += leave_one_out(family, [row for row in published.rows() if row.family == family])
        apart += [
            [f"{family}: {name}, never fitted", *score([r for r in own.never if origin(r) == name]).cells()]
            for name in sorted({origin(row) for row in own.never})
        ]
    what = "n / MAPE / median bias / inside the interval"
    head = ["rows", "fitted", "set aside", "never fitted", "the plan of a fitted row again"]
    table(f"Published steps: {what}", head, steps_by_kind())
    head = ["goals", f"mean error at most {GOAL_MAPE:.0%}: fitted, set aside, never fitted",
            f"groups of five rows or more with a median bias above {GOAL_BIAS:.0%}",
            f"{GOAL_INSIDE[0]:.0%} to {GOAL_INSIDE[1]:.0%} inside: set aside and never fitted"]  # fmt: skip
    table("Goals", head, map(goals_of, FAMILY_NAMES))
    table("Each source by constants that never saw it", ["rows", "n", "MAPE", "median bias", "inside"], apart)


def steps_by_kind() -> list[list[str]]:
    """The lines of the table of errors: one for each kind of parallelism, and one for a family."""
    lines = []
    for family in FAMILY_NAMES:
        sets = published.groups(family)
        for kind in sorted({row.kind for chosen in sets for row in chosen}):
            own = [score([row for row in chosen if row.kind == kind]) for chosen in sets]
            lines.append([f"{family}: {kind}", *(" / ".join(each.cells()) for each in own)])
        lines.append([f"**{family}**", *(" / ".join(score(chosen).cells()) for chosen in sets)])
    return lines


def goals_of(family: str) -> list[str]:
    """A line of the table of goals: what is reached, and what is missed."""
    own = published.groups(family)
    errors = [score(chosen).mape for chosen in (own.fitted, own.aside, own.never) if chosen]
    biased = 0
    for chosen in own:
        kinds = {row.kind for row in chosen}
        biased += sum(score([row for row in chosen if row.kind == kind]).is_biased for kind in kinds)
        biased += score(chosen).is_biased
    inside = score([*own.aside, *own.never]).inside
    reached = (max(errors) <= GOAL_MAPE, not biased, GOAL_INSIDE[0] <= inside <= GOAL_INSIDE[1])
    cells = (", ".join(f"{error:.1%}" for error in errors), str(biased or "none"), f"{inside:.0%}")
    return [family, *(cell if good else f"{cell} missed" for cell, good in zip(cells, reached, strict=True))]


def print_constants(family: str, found: Calibration) -> None:
    values = {" = ".join(names): getattr(found, names[0]) for names in FAMILIES[family][1]}
    print(f"\n{family}: " + ", ".join(f"{names} {value:.3f}" for names, value in values.items()))


def origin(row: published.Row) -> str:
    return f"{row.source} {row.release}".strip()


def leave_one_out(family: str, rows: Sequence[published.Row]) -> list[list[str]]:
    """Scores each source, or each release of the only one, by constants that are fitted on all others.

    Rows that the others repeat, or that gave a constant which is not fitted, are not scored.
    """
    several = len({row.source for row in rows}) > 1
    left_out: dict[str, list[published.Row]] = {}
    for row in rows:
        left_out.setdefault(row.source if several else origin(row), []).append(row)
    found, errors, inside = [], [], 0.0
    for name, whole in left_out.items():
        rest = [row for row in rows if row not in whole]
        own = [row for row in published.apart(whole, rest)[0] if not published.gave_a_constant(row)]
        if not own:
            continue
        constants = fit_family(family, [row for row in rest if row.model.name not in published.NOT_FITTED])
        result = score(own, constants)
        inside += result.rows * result.inside
        found.append([f"{family}: {name}, fitted without it", *result.cells()])
        errors += [step_s(row, constants) / row.seconds - 1 for row in own]
    total = Score(len(errors), mean(map(abs, errors)), median(errors), inside / len(errors))
    return [*found, [f"**{family}: all of these**", *total.cells()]]


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


def memory_of_torchtitan() -> list[list[str]]:
    rows = []
    for model, layout, reported in torchtitan():
        reserve, (low, high) = reserve_factor(layout), closed_form_error(layout)
        allocated = peak(model, layout).allocated / 2**30
        guess, least, most = (
            allocated * factor for factor in (reserve.value, low * reserve.low, high * reserve.high)
        )
        inside = "yes" if least <= reported <= most else "no"
        what = f"{model.name} {layout.describe()}{' compiled' if layout.compiled else ''}"
        rows.append([what, f"{reported} GiB", f"{guess:.1f} GiB", f"{guess / reported - 1:+.1%}", inside])
    return rows


def verdicts_on_what_ran() -> None:
    """Every published step fitted, with settings that the source may not print."""
    ran = {row.plan: row for held_out in (False, True) for row in published.rows(held_out=held_out)}
    plans = {row: estimate(row.model, row.layout, row.node) for row in ran.values()}
    rows = []
    for family in FAMILY_NAMES:
        own = [plan for row, plan in plans.items() if row.family == family]
        tight = sum(plan.tight for plan in own)
        fits = sum(plan.fits for plan in own) - tight
        rows.append([family, str(len(own)), str(fits), str(tight), str(len(own) - fits - tight)])
    table("Published steps that ran", ["rows", "plans", "fits", "tight", "does not fit"], rows)
    names = dict.fromkeys(f"{row.name} on {row.node.name}" for row, plan in plans.items() if not plan.fits)
    print(f"\nSaid not to fit, without a setting that is not printed: {'; '.join(names)}.")


def traced_peaks() -> None:
    from headway.plan.tracer.request import trace_modules

    facts = h200_rows()
    rows = []
    for row, found in zip(facts, trace_modules([h200_settings(i) for i in range(len(facts))]), strict=True):
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
    verdicts_on_what_ran()
    head = ["run", "published", "headway", "error", "inside the interval"]
    table("torchtitan on H100, memory by closed forms", head, memory_of_torchtitan())
    if options.trace:
        traced_peaks()
    speed()


if __name__ == "__main__":
    main()
