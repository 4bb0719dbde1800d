"""Failures: what is recorded about the first one, and how a run that hangs is detected.

`capture` turns an exception into a record, `record` formats it for people, `remote` moves exceptions between ranks.
`heartbeat` shows whether a rank makes progress, and `hang` tells ranks that hold up a run from those that wait;
`exit_deadline` ends a process in bounded time. Nothing here needs torch: node agents use it, too. What a rank does
about a failure is in `dist.control.failure_handler`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.dist.failure.capture import (
        HEARTBEAT as HEARTBEAT,
        no_hang_check as no_hang_check,
        set_phase as set_phase,
    )
    from headway.dist.failure.hang import RankStatus as RankStatus
    from headway.dist.failure.heartbeat import Heartbeat as Heartbeat, HeartbeatReading as HeartbeatReading
    from headway.dist.failure.record import (
        FailureRecord as FailureRecord,
        describe_exit_status as describe_exit_status,
        format_cause as format_cause,
        format_pointer as format_pointer,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
