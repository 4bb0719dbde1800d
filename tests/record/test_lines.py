"""Terminal output becomes the lines of a log: final states, plain text, nothing lost, nothing unbounded."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from headway.record.terminal_lines import LONGEST_CHARS, REPAINT_S, TerminalLines, plain

CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def read(*pieces: str) -> list[str]:
    lines = TerminalLines()
    done = [line for piece in pieces for line in lines.feed(piece)]
    return done + lines.rest()


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\n\n\ntwo\n", ["one", "", "", "two"]),
        ("dos\r\nlines\r\n", ["dos", "lines"]),
        ("no end", ["no end"]),
        ("\r 10%\r 50%\r100%\n", ["100%"]),
        ("\rgone\r\x1b[Kdone\n", ["done"]),
        ("\rgone\x1b[2K\rdone\n", ["done"]),
        ("\rcleared\r       \rtext\n", ["text"]),
        ("|\b/\b-\bok\n", ["ok"]),
        ("\x1b[1;31mred\x1b[0m and \x1b[38;2;1;2;3mtrue colour\x1b[m\n", ["red and true colour"]),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["alink"]),
        ("\x1b]52;c;Y2xpcA==\x07\x1bP1$r\x1b\\\x1b(B\x1bc\x9b31m clip\n", ["31m clip"]),
        ("bell\x07 null\x00 tab\tkept\n", ["bell null tab\tkept"]),
        ("an OSC without end \x1b]0;abc\nnext\n", ["an OSC without end ]0;abc", "next"]),
        ("\x1b]0;abc\nnext\x07\n", ["]0;abc", "next"]),
        ("ümlaut 🚀 \udcff\n", ["ümlaut 🚀 \udcff"]),
        ("\x1b[" + "9" * 99 + "Aup\n", ["up"]),
    ],
)
def test_written_and_read(written: str, lines: list[str]) -> None:
    assert read(written) == lines
    assert read(*written) == lines, "one character at a time"


@given(st.lists(st.text(alphabet="ab \t\r\n\b\x07\x1b[]0;12AK\\\x9b\udcffé"), max_size=8))
def test_pieces_do_not_matter_and_no_control_gets_through(pieces: list[str]) -> None:
    whole = read("".join(pieces))
    assert read(*pieces) == whole
    assert not CONTROLS.search("".join(whole))


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cc"])), max_size=8))
def test_plain_text_is_untouched(lines: list[str]) -> None:
    assert read("".join(f"{line}\n" for line in lines)) == lines


def test_a_line_is_out_as_soon_as_it_is_complete() -> None:
    lines = TerminalLines()
    assert lines.feed("a\nb") == ["a"]
    assert lines.feed("\r\x1b") == []
    assert lines.feed("[Kc\n") == ["c"]


def test_nested_bars_leave_a_handful_of_lines() -> None:
    stream = io.StringIO()
    for _ in tqdm(range(30), desc="epochs", file=stream, mininterval=0, miniters=1, ncols=60):
        for _ in tqdm(
            range(30), desc="batches", file=stream, mininterval=0, miniters=1, ncols=60, leave=False
        ):
            pass
        tqdm.write("said", file=stream)
    written = stream.getvalue()
    assert written.count("\n") > 900, "tqdm paints nested bars with newlines"
    lines = read(written)
    assert len(lines) < 150
    assert lines.count("said") == 30
    assert lines[-1].startswith("epochs: 100%")


def test_live_displays_leave_their_last_state() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60)
    with Progress(console=console, auto_refresh=False) as progress:
        tasks = [progress.add_task(name, total=100) for name in ("first", "second", "third")]
        for step in range(100):
            for task in tasks:
                progress.advance(task)
            progress.refresh()
            if step == 50:
                progress.print("half of it")
    lines = read(stream.getvalue())
    assert len(lines) < 20
    assert lines.count("half of it") == 1
    assert [line.split()[0] for line in lines[-3:]] == ["first", "second", "third"]
    assert all("100%" in line for line in lines[-3:])


def test_a_bar_that_runs_for_hours_gives_signs_of_life() -> None:
    now = 0.0
    lines = TerminalLines(clock=lambda: now)
    seen = []
    for second in range(601):
        now = float(second)
        seen += lines.feed(f"\r{second} s")
    assert 8 <= len(seen) <= 600 / REPAINT_S
    assert seen[0] == "60 s"


def test_a_line_that_never_ends_is_broken_without_loss() -> None:
    lines = TerminalLines()
    pieces = 50
    done = [line for _ in range(pieces) for line in lines.feed("x" * (LONGEST_CHARS // 8))]
    assert len(done) >= 4
    assert all(len(line) <= LONGEST_CHARS * 2 for line in done)
    assert sum(map(len, done + lines.rest())) == pieces * (LONGEST_CHARS // 8)


def test_a_long_print_stays_one_line() -> None:
    assert read("x" * (LONGEST_CHARS * 3), "\n") == ["x" * (LONGEST_CHARS * 3)]


def test_an_endless_escape_is_not_held_for_ever() -> None:
    lines = TerminalLines()
    done = [line for _ in range(100) for line in lines.feed("\x1b]0;" + "x" * 1000)]
    assert sum(map(len, done + lines.rest())) > 90_000


def test_an_absurd_count_is_no_error() -> None:
    assert read("\x1b[" + "9" * 5000 + "Aup\n") == ["up"]


def test_plain_is_one_harmless_line() -> None:
    assert plain("a\nb\x1b[2J\x1b]0;t\x07c\x00\x9bd") == "a bcd"
