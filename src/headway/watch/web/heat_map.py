"""The heat map of a run: which rank was slow, and when, over its newest log points."""

from __future__ import annotations

import time
from statistics import median_low
from typing import Any, Literal

from headway.run import Run
from headway.watch.view.ranks import busy_s, data_share, is_log_point
from headway.watch.view.source import newest_rows

What = Literal["own", "data"]
_BUDGET_ROWS = 1 << 16
_RANK_ROWS = (16, 480)
"""the least and the most that is read of a rank; half of them may be of validations"""
_RANK_BYTES = 1 << 24
_BUDGET_S = 1.0
_MAX_RANKS = 4096
_MAX_COLUMNS = 240


def heat_map(run: Run, ranks: int, what: What) -> dict[str, Any]:
    """Returns a value for each rank and log point: its own time relative to the median, or its share of data wait.

    The more ranks there are, the fewer rows of each are read; if there are very many, not all are read.
    """
    count = min(ranks, _MAX_RANKS)
    most = min(_RANK_ROWS[1], max(_RANK_ROWS[0], _BUDGET_ROWS // max(1, count)))
    begin = time.monotonic()
    cells: dict[int, dict[int, float]] = {}
    moments: dict[int, float] = {}
    read = 0
    for rank in range(count):
        rows = newest_rows(run.path, run.metrics_file(rank), most, limit_bytes=_RANK_BYTES)
        for row in filter(is_log_point, rows):
            value = busy_s(row) if what == "own" else data_share(row)
            if value is not None:
                cells.setdefault(row["step"], {})[rank] = value  # the newest value of a repeated step
                moments[row["step"]] = row["time"]
        read += 1
        if time.monotonic() - begin > _BUDGET_S:
            break
    steps = [step for step in sorted(cells) if 2 * len(cells[step]) > read or read < 3][-_MAX_COLUMNS:]
    usual = {step: median_low(cells[step].values()) if what == "own" else 1.0 for step in steps}
    values = [
        [
            cells[step][rank] / usual[step] if rank in cells[step] and usual[step] > 0 else None
            for step in steps
        ]
        for rank in range(read)
    ]
    return {"steps": steps, "times": [moments[step] for step in steps], "ranks": values, "world_size": ranks}
