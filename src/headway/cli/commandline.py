"""Command lines by argparse, for verbs that start things at once; a mistake in them is one sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, final

from headway.errors import UsageError


@final
class Parser(argparse.ArgumentParser):
    """The command line of a verb. Options are written out in full; a wrong one is a `UsageError`.

    >>> Parser("run", "Runs a script here.", examples).parse_args(["--nprc", "2", "train.py"])
    Traceback (most recent call last):
    headway.errors.UsageError: unrecognized arguments: --nprc; perhaps you meant --nproc; see: headway run --help
    """

    def __init__(self, verb: str, does: str, examples: str) -> None:
        super().__init__(
            prog=f"headway {verb}",
            description=does,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        wrong = message.rpartition("unrecognized arguments: ")[2].split()[0]
        options = re.findall(r"--[\w-]+", self.format_usage())
        close = get_close_matches(wrong, options, n=1) or [each for each in options if each.startswith(wrong)]
        meant = f"; perhaps you meant {close[0]}" if close else ""
        raise UsageError(f"{message}{meant}; see: {self.prog} --help")

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print facts for programs")

    def add_root(self) -> None:
        self.add_argument(
            "--root", default="runs", metavar="DIR", help="where ids are looked up (default: runs)"
        )

    def add_script(self, *, needed: bool = True, module: bool = True) -> None:
        """A script, or with -m a module, and all that follows it: its own command line."""
        if module:
            self.add_argument(
                "-m", dest="module", action="store_true", help="SCRIPT names a module, as for python -m"
            )
        self.add_argument("script", metavar="SCRIPT", nargs=None if needed else "?")
        rest = self.add_argument(
            "args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed on to the script"
        )
        rest.required = False  # else a missing script reads "required: SCRIPT, ARGS"

    def parse_sweep(self, argv: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, for verbs with a script and an --array that may be given several axes at once.

        >>> parser.parse_sweep(["--array", "lr=1e-3,3e-4", "seed=1,2", "train.py"]).array
        ['lr=1e-3,3e-4', 'seed=1,2']
        """
        options = self.parse_args(argv)
        while getattr(options, "array", None) and "=" in options.script and not Path(options.script).exists():
            options.array.append(options.script)  # the next axis, taken for the script until here
            options = self.parse_args(options.args, options)
        return options


def no_verb(word: str, verbs: Iterable[str], group: str = "", *, kind: str = "verb") -> UsageError:
    """The error for a verb that there is not.

    >>> print(no_verb("shwo", ["show", "verify"], "checkpoint"))
    there is no checkpoint verb 'shwo' (did you mean 'show'?); see: headway checkpoint --help
    """
    close = get_close_matches(word, list(verbs), n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    group = group and f"{group} "
    return UsageError(f"there is no {group}{kind} {word!r}{meant}; see: headway {group}--help")


def natural(text: str) -> int:
    """A number of things, for `type=` of an option."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number of 0 or more")
    return int(text)
