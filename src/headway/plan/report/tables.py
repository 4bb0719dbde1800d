"""What people read in a terminal: tables with units. Memory is GiB, rates of bytes are decimal; never mixed."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.plan.machine.hardware import GIB
from headway.plan.report.estimates import Estimate
from headway.plan.report.quantity import Quantity, show
from headway.plan.searcher.layouts import Found, Search
from headway.plan.tracer.measurement import Measurement

_SECTIONS = {
    "Model": ("parameters", "flops"),
    "Memory of the fullest GPU": ("memory",),
    "One step": ("time",),
    "Throughput": ("rate", "mfu", "hfu"),
    "Around it": ("checkpoint", "failure", "goodput", "loader"),
    "The whole run": ("run",),
}


def print_estimate(plan: Estimate, console: Console) -> None:
    """The verdict, then every number."""
    console.print(Text(f"{plan.title} on {plan.node}", style="bold"), soft_wrap=True)
    console.print(Text(plan.verdict, style="green" if plan.fits else "red"), soft_wrap=True)
    for title, prefixes in _SECTIONS.items():
        rows = {key: q for key, q in plan.answers.items() if key.split(".")[0] in prefixes}
        if rows:
            console.print(_answers(title, rows))
    for extra in (_products(plan), _scaling(plan)):
        if extra is not None:
            console.print(extra)
    if plan.sensitivity:
        name, effect = plan.sensitivity[0]
        console.print(f"What matters most: {name}; a fifth worse makes the step {effect:.1%} longer.")
    for note in plan.notes:
        console.print(Text(f"Note: {note}."), soft_wrap=True)
    console.print("Why a number is what it is: --explain KEY")


def _answers(title: str, rows: dict[str, Quantity]) -> RenderableType:
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, show_header=False, min_width=60
    )
    table.add_column("key", style="cyan")
    table.add_column("value", justify="right")
    table.add_column("interval", style="dim")
    for key, quantity in rows.items():
        value, _, interval = str(quantity).partition(" (")
        table.add_row(key, value, f"({interval}" if interval else "")
    return Group(table, Text(""))


def _products(plan: Estimate) -> RenderableType | None:
    if not plan.products:
        return None
    table = Table(title="Matrix products of a layer, forward", title_justify="left", box=None, pad_edge=False)
    for column in ("product", "m x k x n", "FLOP", "FLOP/B", "bound by", "time"):
        left = column in ("product", "bound by")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in plan.products:
        several = "" if row["batch"] == 1 else f"{row['batch']} of "
        table.add_row(
            str(row["name"]), f"{several}{row['m']}x{row['k']}x{row['n']}", show(_number(row["flops"]), "FLOP"),
            f"{_number(row['flops_per_byte']):.0f}", str(row["bound"]), show(_number(row["seconds"]), "s"),
        )  # fmt: skip
    return Group(table, Text(""))


def _scaling(plan: Estimate) -> RenderableType | None:
    if not plan.scaling:
        return None
    table = Table(title="More data-parallel copies", title_justify="left", box=None, pad_edge=False)
    for column in ("GPUs", "step, batch grows", "efficiency", "step, batch stays"):
        table.add_column(column, justify="right")
    for row in plan.scaling:
        strong = row.get("strong_step_s")
        table.add_row(
            f"{row['gpus']:.0f}", show(row["weak_step_s"], "s"), show(row["weak_efficiency"], "share"),
            "" if strong is None else show(strong, "s"),
        )  # fmt: skip
    return Group(table, Text(""))


def print_search(found: Search, console: Console) -> None:
    """The ranking, the Pareto set, and the reasons."""
    console.print(f"{found.tried} layouts tried, {found.fitting} fit in {found.capacity / GIB:.0f} GiB")
    if not found.ranked:
        console.print(f"None fits: the leanest needs {found.smallest / GIB:.0f} GiB.", style="red")
        return
    console.print(_ranking("Fastest", found.ranked[:10]))
    console.print(_ranking("Pareto: less memory for more time", found.pareto[:10]))
    for reason in found.reasons:
        console.print(Text(f"- {reason}"), soft_wrap=True)


def _ranking(title: str, rows: list[Found]) -> RenderableType:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("layout", "step", "memory"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(row.layout.describe(), show(row.seconds, "s"), show(row.needed, "bytes"))
    return Group(table, Text(""))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def print_measurement(found: Measurement, console: Console) -> None:
    """Predicted against measured, a row per batch size."""
    table = Table(
        title=f"Predicted against measured on {found.device}", title_justify="left", box=None, pad_edge=False
    )
    for column in ("batch", "step predicted", "measured", "error", "peak predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for row in found.rows:
        memory = (
            ("", "")
            if row.measured_allocated is None
            else (show(row.measured_allocated, "bytes"), f"{row.memory_error or 0:+.1%}")
        )
        table.add_row(
            str(row.batch_size or ""),
            show(row.predicted_s, "s"),
            show(row.measured_s, "s"),
            "calibrates" if row.fitted else f"{row.time_error:+.1%}",
            show(row.predicted_allocated, "bytes"),
            *memory,
        )
    console.print(table)
    constants = found.calibration
    console.print(
        f"the device takes {constants.scale:.3g} x its roofline, the host {constants.kernel_s * 1e6:.3g} us a kernel"
    )
    notes = found.notes
    if all(row.fitted for row in found.rows):
        notes = [
            *notes,
            "no row is a test of the prediction; give other batch sizes: --batch-size N --also M",
        ]
    for note in notes:
        console.print(Text(f"Note: {note}."), soft_wrap=True)
