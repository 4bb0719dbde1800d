"""The view of a run that terminal, report and page share: read from its directory, in bounded memory.

`RunView.refresh` reads what was written since the last call, and returns a `Snapshot` of plain values. Of long files,
it reads the end and samples the rest; curves have a limited number of points. The content of a run directory is not
trusted: control characters are removed from text, lines and files have limits, links are not followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.view.run_view import RunView as RunView
    from headway.watch.view.snapshot import Snapshot as Snapshot

__getattr__, __dir__, __all__ = lazy.exports(__name__)
