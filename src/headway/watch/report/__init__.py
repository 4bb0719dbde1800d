"""The report of a run: one HTML file without scripts or outside resources, to keep, print or mail.

`accounting` accounts for the time of all attempts, `figures` draws curves and bars, `page` writes the HTML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.report.accounting import (
        PARTS as PARTS,
        TimeAccount as TimeAccount,
        account as account,
        account_run as account_run,
    )
    from headway.watch.report.page import render as render, write_report as write_report

__getattr__, __dir__, __all__ = lazy.exports(__name__)
