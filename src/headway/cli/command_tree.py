"""The tree of commands, read from the parsers of all verbs, for shell completion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, final

from headway.cli.parser import Parser, Verb, inspect_verb
from headway.errors import UsageError

ValueKind = Literal["none", "directory", "run", "choice", "other"]


@final
@dataclass(frozen=True, kw_only=True)
class CommandOption:
    """An option of a command: its names, and what follows it."""

    names: Sequence[str]
    does: str
    value: ValueKind
    choices: Sequence[str] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Command:
    """A verb, or a verb of a group: `headway run`, `headway data pack`."""

    words: tuple[str, ...]
    """empty for `headway` itself"""
    does: str
    options: Sequence[CommandOption] = ()
    verbs: Mapping[str, str] | None = None
    """names of the verbs below it, or the choices of its argument, with what they do"""
    takes_runs: bool = False
    takes_script: bool = False
    """its first argument is a script, and the rest are arguments of the script"""


def read_commands(verbs: Mapping[str, str]) -> list[Command]:
    """Returns all commands, the root first; `verbs` are those of `headway` with what they do.

    >>> [command.words for command in read_commands(VERBS)][:3]
    [(), ('agent',), ('cache',)]
    """
    found = [Command(words=(), does="", options=_ROOT, verbs=dict(sorted(verbs.items())))]
    for name, does in sorted(verbs.items()):
        module = import_module(f"headway.cli.{name.replace('-', '_')}")
        found += _read(module.main, (name,), does, getattr(module, "VERBS", {}))
    return found


_ROOT = [
    CommandOption(names=("--help",), does="list the verbs", value="none"),
    CommandOption(names=("--version",), does="print the version", value="none"),
]


def _read(verb: Verb, words: tuple[str, ...], does: str, below: Mapping[str, Verb]) -> Iterator[Command]:
    found = inspect_verb(verb)
    parser: Parser | None = None
    if isinstance(found, Parser):
        parser = found
    else:
        below = found
        with suppress(UsageError):  # some groups take a file in place of a verb
            own = inspect_verb(verb, ["file.yaml"])
            parser = own if isinstance(own, Parser) else None
    lower = [command for name, each in below.items() for command in _read(each, (*words, name), "", {})]
    actions = [] if parser is None else parser._actions
    positionals = [each for each in actions if not each.option_strings]
    names = {str(choice): "" for each in positionals for choice in each.choices or ()}
    summary = (parser.description or "").partition("\n")[0] if parser else ""
    yield Command(
        words=words,
        does=does or summary,
        options=[_option(each) for each in actions if each.option_strings] or _ROOT[:1],
        verbs=names
        | {command.words[-1]: command.does for command in lower if len(command.words) == len(words) + 1},
        takes_runs=any(str(each.metavar).startswith("RUN") for each in positionals),
        takes_script=any(each.nargs == argparse.REMAINDER for each in positionals),
    )
    yield from lower


def _option(action: argparse.Action) -> CommandOption:
    value: ValueKind = "other"
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        value = "none"
    elif action.choices is not None:
        value = "choice"
    elif action.metavar in ("DIR", "RUN"):
        value = "directory" if action.metavar == "DIR" else "run"
    does = " ".join((action.help or "").partition("(default:")[0].replace("%%", "%").split())
    choices = tuple(map(str, action.choices or ()))
    return CommandOption(names=tuple(action.option_strings), does=does, value=value, choices=choices)
