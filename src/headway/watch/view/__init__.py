"""One view of a run, which the terminal, the report and the page show: read from its directory, in bounded memory.

`RunView.refresh` reads what was written since the last time, and returns a `Snapshot` of plain values. Long files are
read from their end and sampled in between; curves keep a fixed number of points. Nothing that a run directory holds is
trusted: text loses its control characters, lines and files have limits, links are not followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.view.run_view import RunView as RunView
    from headway.watch.view.snapshot import Snapshot as Snapshot

__getattr__, __dir__, __all__ = lazy.exports(__name__)
