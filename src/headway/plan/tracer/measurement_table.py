"""A measurement as a table for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.plan.report.quantity import format_value
from headway.plan.tracer.measurement import Comparison, Measurement


def print_measurement(measurement: Measurement, console: Console) -> None:
    """Prints predicted and measured values, one row per batch size."""
    table = Table(
        title=f"Predicted and measured on {measurement.device}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("batch", "step predicted", "measured", "error", "peak predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for row in measurement.rows:
        table.add_row(*_cells(row))
    console.print(table)
    constants = measurement.calibration
    console.print(
        f"the device takes {constants.scale:.3g} x its roofline, "
        f"the host {constants.kernel_s * 1e6:.3g} us per kernel"
    )
    notes = measurement.notes
    if all(row.fitted for row in measurement.rows):
        notes = [*notes, "no row tests the prediction; give other batch sizes: --batch-size N --also M"]
    for note in notes:
        console.print(Text(f"Note: {note}."), soft_wrap=True)


def _cells(row: Comparison) -> list[str]:
    measured = error = ""
    if row.measured_allocated is not None:
        measured = format_value(row.measured_allocated, "bytes")
        error = f"{row.memory_error or 0:+.1%}"
    return [
        str(row.batch_size or ""),
        format_value(row.predicted_s, "s"),
        format_value(row.measured_s, "s"),
        "calibrates" if row.fitted else f"{row.time_error:+.1%}",
        format_value(row.predicted_allocated, "bytes"),
        measured,
        error,
    ]
