"""The ranks of a run, from the end of each rank's metrics file. If there are many, each refresh reads some."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any, final

from headway.run import Run
from headway.system.jsonlines import is_count, is_number, is_time
from headway.watch.view.snapshot import RankRow
from headway.watch.view.source import LINE_BYTES, Row, RowTail, clean

# as in headway.train.metrics.stragglers, whose package imports torch
SLOW_FACTOR = 1.3
SLOW_LOG_POINTS = 3
MIN_LOST_FRACTION = 0.1
MIN_LOST_S = 1.0

_KEPT_BYTES = 1 << 13
_KEPT_ROWS = 8
_MAX_RANKS = 1 << 16


@final
class RankTable:
    """Compares the newest log points of all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tails: dict[int, RowTail] = {}
        self._rows: dict[int, deque[Row]] = {}
        self._next = 0

    def refresh(self, world_size: int, since: float, budget_s: float) -> None:
        """Reads new rows of ranks 0 to `world_size` - 1, and drops rows older than `since`.

        After `budget_s` seconds it leaves the other ranks to the next calls: there may be thousands of files.
        """
        count = min(world_size, _MAX_RANKS)
        begin = time.monotonic()
        for _ in range(count):
            self._read(self._next % count)
            self._next += 1
            if time.monotonic() - begin > budget_s:
                break
        for rank in list(self._rows):
            rows = self._rows[rank]
            while rows and rows[0]["time"] < since:
                rows.popleft()
            if rank >= count or not rows:
                del self._rows[rank]

    def _read(self, rank: int) -> None:
        tail = self._tails.get(rank)
        if tail is None:
            tail = self._tails[rank] = RowTail(self._run.path, self._run.metrics_file(rank))
        rows = self._rows.setdefault(rank, deque(maxlen=_KEPT_ROWS))
        rows.extend(filter(is_log_point, _read_end(tail)))

    def rows(self, nodes: Mapping[str, Mapping[str, Any]]) -> list[RankRow]:
        """Returns all ranks, the slowest first; `nodes` are the newest device samples by host."""
        known = {rank: rows for rank, rows in self._rows.items() if rows}
        if not known:
            return []
        newest = {rank: busy_s(rows[-1]) for rank, rows in known.items()}
        usual = median_low(newest.values())
        slow = self._stragglers(known)
        gpus = _assign_gpus({rank: str(rows[-1].get("host", "")) for rank, rows in known.items()}, nodes)
        found = [
            RankRow(
                rank=rank,
                host=clean(rows[-1].get("host", ""), 40),
                relative=newest[rank] / usual if usual else None,
                data_share=data_share(rows[-1]),
                memory_peak=peak if is_count(peak := rows[-1].get("memory_peak")) else None,
                step=rows[-1]["step"],
                is_straggler=rank in slow,
                gpu=gpus.get(rank, {}),
            )
            for rank, rows in known.items()
        ]
        return sorted(found, key=lambda row: (-(row.relative or 0.0), row.rank))

    def _stragglers(self, known: Mapping[int, deque[Row]]) -> set[int]:
        """Returns the ranks that were slow at the newest steps that most ranks have, by the rule of the training loop.

        Only the newest rows are kept: a rank that loses less than a second in them is reported by the loop alone.
        """
        steps = Counter(row["step"] for rows in known.values() for row in rows)
        common = sorted(step for step, count in steps.items() if 2 * count > len(known))
        if len(known) < 2 or len(common) < SLOW_LOG_POINTS:
            return set()
        lost, slow = dict.fromkeys(known, 0.0), set(known)
        found: set[int] = set()
        for points, step in enumerate(reversed(common), start=1):
            here = {rank: row for rank, rows in known.items() for row in rows if row["step"] == step}
            usual = median_low(busy_s(row) for row in here.values())
            slow &= {
                rank
                for rank, row in here.items()
                if busy_s(row) > SLOW_FACTOR * usual
                and busy_s(row) - usual > MIN_LOST_FRACTION * sum(row["seconds"].values())
            }
            lost = {rank: lost[rank] + busy_s(here[rank]) - usual for rank in slow}
            if points >= SLOW_LOG_POINTS:
                found |= {rank for rank in slow if lost[rank] >= MIN_LOST_S}
        return found


def _read_end(tail: RowTail) -> list[Row]:
    """Returns the newest of the rows that were added. A row with many metrics may be longer than `_KEPT_BYTES`."""
    before, kept_bytes = tail.offset, _KEPT_BYTES
    while True:
        tail.skip_to_end(kept_bytes)
        rows = tail.read(2 * kept_bytes)
        if rows or tail.offset == before or kept_bytes > LINE_BYTES:
            return rows
        tail.offset, kept_bytes = before, 4 * kept_bytes


def is_log_point(row: Row) -> bool:
    seconds = row.get("seconds")
    return (
        row.get("kind") == "train"
        and is_count(row.get("step"))
        and is_time(row.get("time"))
        and is_number(row.get("busy_seconds"))
        and isinstance(seconds, dict)
        and all(is_number(value) and value >= 0 for value in seconds.values())
    )


def busy_s(row: Row) -> float:
    """Returns the seconds of a rank's own work: waiting for data, and the forward pass."""
    return float(row["busy_seconds"])


def data_share(row: Row) -> float | None:
    whole = sum(row["seconds"].values())
    return row["seconds"].get("data", 0.0) / whole if whole else None


def _assign_gpus(
    hosts: Mapping[int, str], nodes: Mapping[str, Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """Returns the GPU of each rank, in the order of ranks, for nodes with as many GPUs as ranks."""
    found: dict[int, Mapping[str, Any]] = {}
    by_host: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        by_host.setdefault(hosts[rank], []).append(rank)
    for host, ranks in by_host.items():
        gpus = nodes.get(host, {}).get("gpus", [])
        if len(gpus) == len(ranks):
            found |= dict(zip(ranks, gpus, strict=True))
    return found
