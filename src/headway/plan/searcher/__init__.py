"""Which layout is best: `search` tries all valid layouts and ranks those that fit; `find_remedies` finds the changes
that make one layout fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.searcher.layouts import (
        Candidate as Candidate,
        SearchResult as SearchResult,
        search as search,
    )
    from headway.plan.searcher.remedies import Remedy as Remedy, find_remedies as find_remedies

__getattr__, __dir__, __all__ = lazy.exports(__name__)
