"""On a real pseudo-terminal: bars, live displays, prompts and the debugger work as without a log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Terminal = Callable[..., str]
Lines = Callable[..., list[str]]


def test_the_terminal_is_one(terminal: Terminal, lines: Lines) -> None:
    shown = terminal("""
with rank_log(run, rank=0, attempt=1):
    print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.fileno(), sys.stderr.fileno())
""")
    assert shown == "True True 1 2\r\n"
    assert lines() == ["True True 1 2"]


def test_tqdm(terminal: Terminal, lines: Lines) -> None:
    shown = terminal("""
from tqdm import tqdm, trange
with rank_log(run, rank=0, attempt=1):
    for epoch in trange(3, desc='epochs', mininterval=0):
        for batch in trange(20, desc='batches', mininterval=0, leave=False):
            pass
        tqdm.write(f'epoch {epoch} done')
""")
    assert shown.count("\rbatches") > 20, "the bar moves on the terminal"
    assert "\x1b[A" in shown, "and nested bars climb"
    written = lines()
    assert [line for line in written if "done" in line] == ["epoch 0 done", "epoch 1 done", "epoch 2 done"]
    assert written[-1].startswith("epochs: 100%") and "3/3" in written[-1]
    assert len(written) < 12
    assert not any("\r" in line or "\x1b" in line for line in written)


def test_rich_progress(terminal: Terminal, lines: Lines) -> None:
    shown = terminal("""
from rich.console import Console
from rich.progress import Progress
with rank_log(run, rank=0, attempt=1):
    console = Console()
    assert console.is_terminal and console.color_system == '256', console.color_system
    with Progress(console=console, auto_refresh=False) as progress:
        first, second = progress.add_task('first', total=30), progress.add_task('second', total=30)
        for _ in range(30):
            progress.advance(first); progress.advance(second); progress.refresh()
            if progress.tasks[0].completed == 10: print('a print in between')
""")
    assert shown.count("\x1b[1A") > 20, "the display is live"
    written = lines()
    assert "a print in between" in written
    assert [line.split()[0] for line in written[-2:]] == ["first", "second"]
    assert all("100%" in line for line in written[-2:])
    assert len(written) < 15


def test_the_debugger(terminal: Terminal, lines: Lines) -> None:
    shown = terminal(
        """
import linecache
with rank_log(run, rank=0, attempt=1):
    secret = 41
    breakpoint()
    print('after the debugger')
""",
        keys=[("(Pdb) ", "p secret + 1\n"), ("(Pdb) ", "c\n")],
    )
    assert "\n42\r\n" in shown
    assert shown.endswith("after the debugger\r\n")
    assert "42" in lines() and lines()[-1] == "after the debugger"


def test_a_question(terminal: Terminal, lines: Lines) -> None:
    shown = terminal(
        """
import readline
with rank_log(run, rank=0, attempt=1):
    print('you said', input('name? '))
""",
        keys=[("name? ", "ada\x7f\x7fmy\n")],
    )
    assert shown.endswith("you said amy\r\n"), "line editing works: readline has the terminal"
    assert lines() == ["you said amy"]


@pytest.mark.parametrize("rank", [1])
def test_other_ranks_are_silent(terminal: Terminal, lines: Lines, rank: int) -> None:
    shown = terminal(f"""
from rich.console import Console
from tqdm import trange
with rank_log(run, rank={rank}, attempt=1):
    assert not sys.stdout.isatty()
    for _ in trange(5, file=sys.stderr, mininterval=0): pass
    Console().print('[red]hello[/red]')
""")
    assert shown == ""
    written = lines(rank)
    assert written[0].startswith("100%") and written[1] == "hello" and len(written) == 2
