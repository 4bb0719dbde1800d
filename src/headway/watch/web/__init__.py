"""`headway web`: runs in a browser, on this machine only.

`server` listens on 127.0.0.1; `guard` lets nobody in without the token; `app` has an address for each question, which
`run_list`, `run_library`, `blocks`, `curves`, `heat_map`, `texts` and `media` answer from the views of runs. The page
itself is in `static`: plain modules of JavaScript, a style sheet, and uPlot for curves. Everything is read-only, and
nothing is fetched from elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.web.app import make_app as make_app
    from headway.watch.web.run_library import RunLibrary as RunLibrary
    from headway.watch.web.server import listen as listen, serve as serve

__getattr__, __dir__, __all__ = lazy.exports(__name__)
