"""Converts what a program writes to a terminal into the lines of a log file.

Programs repaint a terminal: progress bars return the carriage, nested bars move up a few lines, colors and titles are
escape sequences. A log file has each line once, in its last state, as plain text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import final

LONGEST_CHARS = 1 << 16
"""length at which a line that is written in many pieces is broken, so that a program that never ends its line does not
fill the memory. Text that is written at once stays one line, however long."""

REPAINT_S = 60.0
"""how often a progress bar that only repaints itself leaves a line, which shows how far a killed run got"""

_MOST_ROWS = 200
_LONGEST_ESCAPE_CHARS = 4096

_CONTROL = re.compile(
    r"\x1b\[(?P<count>[0-?]*)[ -/]*(?P<final>[@-~])"  # CSI: colors, cursor, erase
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC and its relatives: title, hyperlink, clipboard
    r"|\x1b(?![]PX^_[])[ -/]*[0-~]"  # short escapes
    r"|(?P<byte>[\x00-\x08\x0a-\x1f\x7f-\x9f])"  # C0 except the tab, DEL, C1
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")


def plain(text: str) -> str:
    """Returns `text` on one line, without anything that a terminal would interpret.

    >>> plain("loss\\x1b[31m 0.5\\x1b[0m\\x1b]0;title\\x07\\nrm -rf")
    'loss 0.5 rm -rf'
    """
    return _CONTROL.sub(lambda match: " " if match["byte"] in ("\n", "\r") else "", text)


@final
class TerminalLines:
    """Collects the text of one stream and returns its finished lines.

    >>> lines = TerminalLines()
    >>> lines.feed("\\r 10%"), lines.feed("\\r100%"), lines.feed("\\ndone\\nhalf a")
    ([], [], ['100%', 'done'])
    >>> lines.rest()
    ['half a']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._partial = ""  # an escape sequence whose end is missing
        self._rows = {0: ""}  # the bottom row, and those above it that are being repainted
        self._row = 0
        self._returned = False  # the cursor is at the left edge: the next text replaces the row

    def feed(self, text: str) -> list[str]:
        """Takes the next text of the stream; returns the lines that are final now."""
        text = self._partial + text
        unfinished = _UNFINISHED.search(text, max(0, len(text) - _LONGEST_ESCAPE_CHARS))
        self._partial = unfinished[0] if unfinished else ""
        done: list[str] = []
        start, end = 0, len(text) - len(self._partial)
        for match in _CONTROL.finditer(text, 0, end):
            self._put(text[start : match.start()], done)
            self._control(match, done)
            start = match.end()
        self._put(text[start:end], done)
        return done

    def rest(self) -> list[str]:
        """Returns the unfinished lines, at the end of the stream."""
        return self._take()

    def _put(self, text: str, done: list[str]) -> None:
        if not text:
            return
        row = "" if self._returned else self._rows.get(self._row, "")
        self._returned = False
        if len(row) > LONGEST_CHARS:
            done.append(row)
            row = ""
        self._rows[self._row] = row + text

    def _control(self, match: re.Match[str], done: list[str]) -> None:
        match match["byte"] or match["final"]:
            case "\n":
                self._newline(done)
            case "\r":
                self._return(done)
            case "\b":
                self._rows[self._row] = self._rows.get(self._row, "")[:-1]
            case "A":
                self._row = min(self._row + _count(match), _MOST_ROWS)
            case "B":
                self._row = max(self._row - _count(match), 0)
            case "G" if _count(match) == 1:
                self._return(done)
            case "K" if self._returned or match["count"] == "2":
                self._rows[self._row] = ""

    def _newline(self, done: list[str]) -> None:
        if self._row:  # inside the repainted rows, only the cursor moves
            self._row -= 1
            self._returned = True
            return
        bottom = self._rows.pop(0)
        done.extend([*self._take(), bottom])
        self._returned = False

    def _return(self, done: list[str]) -> None:
        self._returned = True
        if self._clock() - self._last > REPAINT_S:
            row = self._row
            done.extend(self._take())
            self._row = row

    def _take(self) -> list[str]:
        taken = [self._rows[row] for row in sorted(self._rows, reverse=True) if self._rows[row].strip()]
        self._rows, self._row, self._last = {0: ""}, 0, self._clock()
        return taken


def _count(match: re.Match[str]) -> int:
    digits = match["count"][:4]
    return max(int(digits), 1) if digits.isdecimal() else 1
