"""Estimates and searches as tables for the terminal. Memory is in GiB, rates of bytes are decimal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.plan.machine.hardware import GIB
from headway.plan.report.estimates import Estimate
from headway.plan.report.quantity import Quantity, format_value
from headway.plan.searcher.layouts import Candidate, SearchResult

_SECTIONS = {
    "Model": ("parameters", "flops"),
    "Memory of the fullest GPU": ("memory",),
    "One step": ("time",),
    "Throughput": ("rate", "mfu", "hfu"),
    "Checkpoints, failures, data": ("checkpoint", "failure", "goodput", "loader"),
    "Complete run": ("run",),
}


def print_estimate(plan: Estimate, console: Console) -> None:
    """Prints the verdict, then every answer."""
    console.print(Text(f"{plan.title} on {plan.node}", style="bold"), soft_wrap=True)
    style = "bold yellow" if plan.tight else "green" if plan.fits else "red"
    console.print(Text(plan.verdict, style=style), soft_wrap=True)
    for title, prefixes in _SECTIONS.items():
        rows = {key: q for key, q in plan.answers.items() if key.split(".")[0] in prefixes}
        if rows:
            console.print(_answers(title, rows))
    for extra in (_products(plan), _scaling(plan)):
        if extra is not None:
            console.print(extra)
    if plan.sensitivity:
        name, effect = plan.sensitivity[0]
        console.print(f"Most sensitive to {name}: 20 % worse makes the step {effect:.1%} longer.")
    for note in plan.notes:
        console.print(Text(f"Note: {note}."), soft_wrap=True)
    console.print("Formula and source of a number: --explain KEY")


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
        several = "" if row["batch"] == 1 else f"{row['batch']:.12g} of "
        table.add_row(
            row["name"], f"{several}{row['m']}x{row['k']}x{row['n']}", format_value(row["flops"], "FLOP"),
            f"{row['flops_per_byte']:.0f}", row["bound"], format_value(row["seconds"], "s"),
        )  # fmt: skip
    return Group(table, Text(""))


def _scaling(plan: Estimate) -> RenderableType | None:
    if not plan.scaling:
        return None
    table = Table(title="More data-parallel replicas", title_justify="left", box=None, pad_edge=False)
    for column in ("GPUs", "step, weak", "efficiency", "step, strong"):
        table.add_column(column, justify="right")
    for row in plan.scaling:
        strong = row.get("strong_step_s")
        table.add_row(
            f"{row['gpus']:.0f}", format_value(row["weak_step_s"], "s"), format_value(row["weak_efficiency"], "share"),
            "" if strong is None else format_value(strong, "s"),
        )  # fmt: skip
    return Group(table, Text(""))


def print_search(found: SearchResult, console: Console) -> None:
    """Prints the ranking, the Pareto set, and the reasons."""
    console.print(f"{found.tried} layouts tried, {found.fitting} fit in {found.capacity / GIB:.0f} GiB")
    if not found.ranked:
        console.print(f"None fits: the smallest needs {found.smallest / GIB:.0f} GiB.", style="red")
        return
    console.print(_ranking("Fastest", found.ranked[:10]))
    console.print(_ranking("Pareto: less memory for more time", found.pareto[:10]))
    for reason in found.reasons:
        console.print(Text(f"- {reason}"), soft_wrap=True)


def _ranking(title: str, rows: list[Candidate]) -> RenderableType:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("layout", "step", "memory", "at most", "microbatches", "runs in train"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.layout.describe(), format_value(row.seconds, "s"), format_value(row.needed, "bytes"),
            format_value(row.most, "bytes"), str(row.layout.microbatches), "yes" if row.layout.trainable else "",
        )  # fmt: skip
    return Group(table, Text(""))
