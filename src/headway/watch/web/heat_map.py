"""The heat map of a run: which rank was slow, and when, over its newest log points."""

from __future__ import annotations

import time
from statistics import median_low
from typing import Any, Literal

from headway.run import Run
from headway.watch.view.ranks import busy_s, data_share, is_log_point
from headway.watch.view.source import RowTail

What = Literal["own", "data"]
_BUDGET_BYTES = 16 << 20
_RANK_BYTES = (1 << 13, 1 << 18)
"""the least and the most that is read of a rank"""
_BUDGET_S = 1.0
_MAX_RANKS = 4096
_MAX_COLUMNS = 240


def heat_map(run: Run, ranks: int, what: What) -> dict[str, Any]:
    """Returns a value for each rank and log point: its own time relative to the median, or its share of data wait.

    The more ranks there are, the less of each is read; if there are very many, not all are read.
    """
    count = min(ranks, _MAX_RANKS)
    each_bytes = min(_RANK_BYTES[1], max(_RANK_BYTES[0], _BUDGET_BYTES // max(1, count)))
    begin = time.monotonic()
    cells: dict[int, dict[int, float]] = {}
    moments: dict[int, float] = {}
    read = 0
    for rank in range(count):
        tail = RowTail(run.path, run.metrics_file(rank))
        tail.skip_to_end(each_bytes)
        for row in filter(is_log_point, tail.read(2 * each_bytes)):
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
