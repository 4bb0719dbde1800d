"""What people see of runs: `select` and `summarize` list them (`headway runs`), `compare` shows them side by side, and
`samples_of` finds the samples of a step. `view` reads one run, `terminal` shows it live, `report` writes it as a page;
`housekeeping` removes and archives runs. Everything is read from run directories, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.comparison import RunComparison as RunComparison, compare as compare
    from headway.watch.runs import (
        RunSummary as RunSummary,
        resolve as resolve,
        select as select,
        summarize as summarize,
    )
    from headway.watch.samples import StepSamples as StepSamples, samples_of as samples_of

__getattr__, __dir__, __all__ = lazy.exports(__name__)
