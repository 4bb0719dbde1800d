"""The live screen of `headway watch`, and its plain lines for pipes.

`screen` lays out a snapshot for a terminal of any size, as a pure function; `charts` draws bars and curves with
characters; `live` keeps the screen up to date and reads keys; `lines` prints one line every few seconds instead.

The screen uses rich. Importing textual takes several times the CPU time, for widgets that a screen without input fields
does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.watch.terminal.lines import follow as follow
    from headway.watch.terminal.live import watch as watch
    from headway.watch.terminal.screen import Selection as Selection, layout as layout

__getattr__, __dir__, __all__ = lazy.exports(__name__)
