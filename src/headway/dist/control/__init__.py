"""The control plane: how ranks learn within milliseconds that one of them failed, hangs, or was asked to stop.

A `Hub` in rank 0's process has one signed `Channel` to the `Peer` in each rank. Over it ranks report failures, agree
on the step at which all of them stop (`Agreement`), and report where they are when the run seems to hang (`HangWatch`).
`failure_handler` ends a rank when it or another one fails. `stop` turns signals and the end of the job's time into stop
requests; `signals` protects data workers from these signals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.dist.control.signals import (
        STOP_REQUESTS as STOP_REQUESTS,
        block_signals as block_signals,
        end_by_own_signal as end_by_own_signal,
        ignore_signals as ignore_signals,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
