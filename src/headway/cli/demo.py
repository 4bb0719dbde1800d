"""`headway demo`: a tour of headway on this machine."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from headway.cli.parser import Parser
from headway.cli.screen import console
from headway.errors import DONE

_EXAMPLES = """\
examples:
  headway demo                     in headway-demo, or headway-demo-2 if that exists
  headway demo /scratch/me/demo    in a directory that is new or empty
  headway demo --quick             a short training, to see whether everything works here

Draws pictures, packs them into shards, plans the run, trains on two processes, kills one of them halfway, resumes,
compares every step with an uninterrupted run, and writes report.html. It prints each command before it runs it; they
work just as well when you type them. Needs no network and no GPU, and leaves nothing but its directory.

Exit codes: 0 success; 1 a step failed (the last line says which); 2 bad usage; 130 Ctrl-C.
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "demo", "Takes a tour on this machine: a training is killed, resumed and compared.", _EXAMPLES
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        help="new or empty directory (default: headway-demo)",
    )
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    options = parser.parse_args(argv)

    from headway.demo.tour import FULL, QUICK, give_tour  # late: it is not needed for --help

    directory = options.directory or _unused_directory()
    give_tour(directory, console(), size=QUICK if options.quick else FULL)
    return DONE


def _unused_directory() -> Path:
    names = (Path(f"headway-demo-{number}" if number > 1 else "headway-demo") for number in count(1))
    return next(path for path in names if not path.exists())
