"""Parses the command lines of all verbs, with argparse. A mistake raises `UsageError`, with exit code 2.

A verb either adds its options one by one to a `Parser`, or describes them as a frozen dataclass for `parse`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from stat import S_ISDIR
from textwrap import dedent
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

from headway.errors import DONE, UsageError, closest

_LARGEST = 1e9
T = TypeVar("T")

Verb = Callable[[list[str]], int]


@final
class Parser(argparse.ArgumentParser):
    """The parser of a verb. Options cannot be abbreviated; an unknown one raises `UsageError`.

    >>> Parser("run", "Runs a script here.", examples).parse_args(["--nprc", "2", "train.py"])
    Traceback (most recent call last):
    headway.errors.UsageError: unrecognized arguments: --nprc (did you mean --nproc?); see: headway run --help
    """

    def __init__(self, verb: str, does: str, examples: str = "") -> None:
        super().__init__(
            prog=f"headway {verb}",
            description=does,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, *given: Any) -> Any:  # type: ignore[override]  # as all of argparse's methods do
        _stop_if_inspecting(self)
        return super().parse_known_args(*given)

    def parse_known_intermixed_args(self, *given: Any) -> Any:  # type: ignore[override]
        _stop_if_inspecting(self)
        return super().parse_known_intermixed_args(*given)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses empty words, which no argument of headway's own takes: an empty path would be this directory."""
        if "" in arg_strings and action.nargs != argparse.REMAINDER:
            raise argparse.ArgumentError(action, "got an empty argument, perhaps an unset variable")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        if unknown:
            options = [name for action in self._actions for name in action.option_strings if name[:2] == "--"]
            close = closest(next(iter(words.split()), ""), options)
            message += f" (did you mean {close}?)" if close else ""
            message += "" if words else "an empty argument, perhaps an unset variable"
        raise UsageError(f"{message}; see: {self.prog} --help")

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print JSON")

    def add_run(
        self, name: str = "run", *, nargs: str | None = None, metavar: str = "RUN", more: str = ""
    ) -> None:
        """Adds a run, or several, and --root, where ids are looked up; `more` is appended to the help."""
        text = f"run directory, id, or beginning or end of an id{more}"
        self.add_argument(name, metavar=metavar, nargs=nargs, help=text)
        self.add_argument(
            "--root", default="runs", metavar="DIR", help="where ids are looked up (default: runs)"
        )

    def add_script(self, *, needed: bool = True, module: bool = True) -> None:
        """Adds a script, or with -m a module, and the arguments of the script."""
        if module:
            self.add_argument(
                "-m", dest="module", action="store_true", help="SCRIPT names a module, as for python -m"
            )
        self.add_argument(
            "script", metavar="SCRIPT", nargs=None if needed else "?", help="Python script to run"
        )
        rest = self.add_argument(
            "args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script"
        )
        rest.required = False  # else a missing script reads "required: SCRIPT, ARGS"

    def parse_sweep(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses like `parse_args`, for verbs with a script and an --array that takes several axes at once.

        >>> parser.parse_sweep(["--array", "lr=1e-3,3e-4", "seed=1,2", "train.py"]).array
        ['lr=1e-3,3e-4', 'seed=1,2']
        """
        options = self.parse_args(argv)
        while (
            getattr(options, "array", None) and "=" in options.script and not os.path.lexists(options.script)
        ):
            options.array.append(options.script)  # argparse took the next axis for the script
            options = self.parse_args(options.args, options)
        return options


# --- inspecting a verb without running it

_is_inspecting = ContextVar("is_inspecting", default=False)


@final
class _Stopped(Exception):
    """Ends a verb that is inspected where it would parse its command line."""


def _stop_if_inspecting(found: Parser | Mapping[str, Verb]) -> None:
    if _is_inspecting.get():
        raise _Stopped(found)


def inspect_verb(verb: Verb, argv: Sequence[str] = ("--help",)) -> Parser | Mapping[str, Verb]:
    """Returns the parser of a verb, or the verbs of a group: calls it up to where it would parse its command line.

    >>> inspect_verb(headway.cli.run.main).prog
    'headway run'
    """
    before = _is_inspecting.set(True)
    try:
        verb([*argv])
    except _Stopped as stopped:
        found: Parser | Mapping[str, Verb] = stopped.args[0]
        return found
    finally:
        _is_inspecting.reset(before)
    raise AssertionError(f"{verb} does not parse a command line")


def dispatch(group: str, verbs: Mapping[str, Verb], usage: str, argv: list[str]) -> int:
    """Runs a verb of a group, like `headway data ls`; without a verb, prints the usage of the group."""
    _stop_if_inspecting(verbs)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage, end="")
        return DONE
    if argv[0] not in verbs:
        raise unknown_verb(argv[0], verbs, group)
    return verbs[argv[0]](argv[1:])


def unknown_verb(word: str, verbs: Iterable[str], group: str = "", *, kind: str = "verb") -> UsageError:
    """Returns the error for a verb that does not exist.

    >>> print(unknown_verb("shwo", ["show", "verify"], "checkpoint"))
    there is no checkpoint verb 'shwo' (did you mean 'show'?); see: headway checkpoint --help
    """
    close = closest(word, verbs)
    meant = f" (did you mean {close!r}?)" if close else ""
    group = group and f"{group} "
    return UsageError(f"there is no {group}{kind} {word!r}{meant}; see: headway {group}--help")


def whole(text: str) -> int:
    """Parses a whole number, for `type=` of an option."""
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number")
    return int(text)


def natural(text: str) -> int:
    """Parses a whole number of 0 or more, for `type=` of an option."""
    if not re.fullmatch(r"\+?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """Parses a whole number of 1 or more, for `type=` of an option."""
    if not re.fullmatch(r"\+?[0-9]{1,18}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number of 1 or more")
    return int(text)


def finite(text: str) -> float:
    """Parses a finite number, for `type=` of an option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a finite number")
    return number


def above_zero(text: str) -> float:
    """Parses a number above 0, for `type=` of an option; it has a limit because no clock takes 1e300 seconds."""
    number = finite(text)
    if not 0 < number <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number above 0 and at most {_LARGEST:g}")
    return number


def require_path(path: Path, kind: Literal["file", "directory"]) -> Path:
    """Returns the path if it exists. If that cannot be determined, the error is left to the code that opens it."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no {kind} {str(path)!r}") from None
    except OSError:
        return path
    if kind == "directory" and not S_ISDIR(mode):
        raise UsageError(f"{str(path)!r} is not a directory")
    return path


# --- command lines from dataclasses


@dataclass(frozen=True)
class Positional:
    """Marks a field that is a positional argument: `path: Annotated[Path, Positional("PATH")]`.

    Any other field may be marked with a function that parses it: `steps: Annotated[int, positive]`.
    """

    metavar: str


def parse(settings: type[T], argv: Sequence[str], *, verb: str) -> T:
    """Parses a command line into a frozen dataclass: an option per field, with the field's docstring as help.

    A field that is itself a dataclass becomes a group of options.

    >>> parse(ShowOptions, ["--json", "runs/x7k2"], verb="checkpoint show")
    ShowOptions(path=PosixPath('runs/x7k2'), json=True)
    """
    parser = Parser(verb, inspect.getdoc(settings) or "")
    _add_fields(parser, settings)
    return _make(settings, vars(parser.parse_intermixed_args(argv)))


def _add_fields(group: argparse._ActionsContainer, settings: type[Any], prefix: str = "") -> None:
    types = get_type_hints(settings, include_extras=True)
    texts = field_docstrings(settings)
    for each in fields(settings):
        kind = types[each.name]
        if is_dataclass(kind) and isinstance(kind, type):
            title = (inspect.getdoc(kind) or "").partition("\n")[0]
            _add_fields(group.add_argument_group(f"{each.name} options", title), kind, f"{each.name}.")
        else:
            _add_option(group, each, kind, texts.get(each.name, ""), dest=prefix + each.name)


def _add_option(
    group: argparse._ActionsContainer, each: Field[Any], kind: Any, help: str, *, dest: str
) -> None:
    """Adds the option of a field."""
    flag = f"--{each.name.replace('_', '-')}"
    default = each.default if each.default_factory is MISSING else each.default_factory()
    required = default is MISSING
    if default not in (MISSING, None, False, (), {}) and "default:" not in help:
        help = f"{help} (default: %(default)s)".lstrip()
    kind, mark = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if isinstance(mark, Positional):
        many = get_origin(kind) is tuple
        group.add_argument(
            dest,
            metavar=mark.metavar,
            type=_reader(get_args(kind)[0] if many else kind),
            nargs="*" if many else None,
            help=help,
        )
    elif kind is bool:
        action = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(flag, dest=dest, action=action, default=default, help=help)
    elif get_origin(kind) is tuple:
        item = get_args(kind)[0]
        group.add_argument(
            flag,
            dest=dest,
            type=mark or _reader(item),
            nargs="*",
            metavar=_metavar(item),
            default=default,
            help=help,
        )
    elif get_origin(kind) is dict:
        group.add_argument(
            flag, dest=dest, type=_pair, nargs="+", metavar="NAME=N", default=default, help=help
        )
    else:
        kind = _without_none(kind)
        given: dict[str, Any] = {"choices": get_args(kind)}
        if get_origin(kind) is not Literal:
            given = {"type": mark or _reader(kind), "metavar": _metavar(kind)}
        group.add_argument(flag, dest=dest, required=required, default=default, help=help, **given)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not types.NoneType)
    return kind


def _reader(kind: Any) -> Callable[[str], Any]:
    readers: dict[Any, Callable[[str], Any]] = {int: whole, float: finite, Path: Path, str: str}
    return readers[kind]


def _metavar(kind: Any) -> str | None:
    return {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(kind)


def _pair(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not re.fullmatch(r"-?[0-9]{1,18}", number) or not name:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not NAME=NUMBER")
    return name, int(number)


def _make(settings: type[T], given: Mapping[str, Any], prefix: str = "") -> T:
    types = get_type_hints(settings)
    values: dict[str, Any] = {}
    for each in fields(settings):  # type: ignore[arg-type]  # T is a dataclass
        kind, dest = types[each.name], prefix + each.name
        if is_dataclass(kind) and isinstance(kind, type):
            values[each.name] = _make(kind, given, f"{each.name}.")
        elif get_origin(kind) in (tuple, dict):
            values[each.name] = get_origin(kind)(given[dest])
        else:
            values[each.name] = given[dest]
    return settings(**values)


def field_docstrings(settings: type[Any]) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass and its bases; none where there is no source to read."""
    texts: dict[str, str] = {}
    for each in reversed(settings.__mro__):
        if is_dataclass(each):
            try:
                (node,) = ast.parse(dedent(inspect.getsource(each))).body
            except OSError:  # an installation of compiled files only, or of another user
                continue
            assert isinstance(node, ast.ClassDef)
            for field, below in pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return {name: text.replace("%", "%%") for name, text in texts.items()}
