"""The records of a run: attempts, rank logs, events, alerts, diagnostics, the start-up screen, the ledger, sinks.

    with record.recording(run, world, config=config):
        train()

Names are loaded on first use: reading run directories needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.record.attempt import Recording as Recording, recording as recording
    from headway.record.diagnostics import collect as collect
    from headway.record.rank_logs import RankLog as RankLog, rank_log as rank_log

__getattr__, __dir__, __all__ = lazy.exports(__name__)
