"""What people read: `estimate` computes every answer as a `Quantity` with interval, formula and source; tables print
it in a terminal, and `html` renders it as a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.report.estimates import Estimate as Estimate, estimate as estimate
    from headway.plan.report.html import render_page as render_page
    from headway.plan.report.quantity import Quantity as Quantity
    from headway.plan.report.tables import print_estimate as print_estimate, print_search as print_search

__getattr__, __dir__, __all__ = lazy.exports(__name__)
