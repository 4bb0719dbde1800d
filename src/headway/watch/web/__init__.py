"""`headway web`: runs in a browser, on this machine only.

`server` listens on 127.0.0.1; `guard` refuses requests without the token; `app` routes the others to `run_list`,
`run_library`, `blocks`, `curves`, `heat_map`, `texts` and `media`, which read the views of runs. The page itself is in
`static`: plain JavaScript modules, a style sheet, and uPlot for curves. Everything is read-only, and nothing is loaded
from other hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.web.app import make_app as make_app
    from headway.watch.web.run_library import RunLibrary as RunLibrary
    from headway.watch.web.server import listen as listen, serve as serve

__getattr__, __dir__, __all__ = lazy.exports(__name__)
