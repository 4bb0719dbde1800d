"""Time limits as SLURM writes them."""

from __future__ import annotations

import re

from headway.errors import UsageError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def parse_time_limit(time: str) -> int:
    """Converts a time limit to seconds.

    >>> parse_time_limit("90"), parse_time_limit("1:30:00"), parse_time_limit("1-12"), parse_time_limit("2-0:30")
    (5400, 5400, 129600, 174600)
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise UsageError(f"time={time!r:.80} is not a valid time limit; write minutes, H:M:S or D-H:M:S")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, rest = (*parts, 0, 0)[:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)
