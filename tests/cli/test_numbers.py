"""Every number option of every verb: what is not a number, or not one that can work, is one sentence with its name."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headway.cli import VERBS, main, parser
from headway.cli.target_options import read_options

NEVER = ["nan", "inf", "-inf", "1e400", "-1e400", "", "x", "1,5", "0x10", "9" * 5000]
"""no option takes these"""
TAKES = {
    "0": {"--max-requeues", "--max-restarts", "-n", "--port", "--seed", "--zero"},
    "-1": set(),
}
"""the options that take numbers which others refuse"""
READERS = (parser.whole, parser.natural, parser.positive, parser.finite, parser.above_zero)


class Reached(Exception):
    """The command line was accepted."""


@dataclass
class Found:
    """The parser of a verb."""

    verb: tuple[str, ...]
    parser: parser.Parser


def collect(monkeypatch: pytest.MonkeyPatch) -> list[Found]:
    """Calls every verb of every group up to where it would parse its arguments."""
    found: list[Found] = []
    at: list[tuple[str, ...]] = []
    todo: list[tuple[tuple[str, ...], Callable[[list[str]], int]]] = []

    def stop(self: parser.Parser, *_: object) -> NoReturn:
        found.append(Found(at[-1], self))
        raise Reached

    def note(_: str, verbs: dict[str, Any], *__: object) -> int:
        todo.extend(((*at[-1], name), call) for name, call in verbs.items())
        raise Reached

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(parser.Parser, name, stop)
        for name in VERBS:
            module = importlib.import_module(f"headway.cli.{name.replace('-', '_')}")
            if hasattr(module, "dispatch"):
                patch.setattr(module, "dispatch", note)
            todo.append(((name,), module.main))
        todo.append((("runs", "samples"), importlib.import_module("headway.cli.samples").main))
        for verb, call in todo:
            at.append(verb)
            for argv in ([], ["x.py:f"], ["x.yaml"]):
                with pytest.raises((Reached, parser.UsageError)):
                    call(argv)
    return list({each.parser.prog: each for each in found}.values())


def line(found: Found, action: argparse.Action, value: str) -> list[str]:
    """A whole command line in which one option has this value."""
    needed: list[str] = []
    for other in found.parser._actions:
        if other.required and other is not action and other.nargs != argparse.REMAINDER:
            values = (
                ["1"]
                if other.type in READERS
                else ["train.py:f" if other.dest.endswith("factory") else "train.py"]
            )
            needed += [*other.option_strings[:1], *values]
    return [
        f"{action.option_strings[0]}={value}" if action.option_strings[0][:2] == "--" else f"-n{value}",
        *needed,
    ]


def refusal(found: Found, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the sentence with which a command line is refused; "" if it is accepted."""
    with suppress(Reached):
        code = main([*found.verb, *(["--dry-run"] if found.verb == ("submit",) else []), *argv])
        shown = capsys.readouterr().err
        assert code == 2 or found.verb == ("submit",), shown
        return shown
    return ""


def test_every_number_of_every_verb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    found = collect(monkeypatch)
    parse_args, make = parser.Parser.parse_args, parser._make

    def parse_and_stop(self: parser.Parser, *given: Any) -> Any:
        options = parse_args(self, *given)
        if self.prog == "headway submit":  # its target checks the rest
            return options
        if self.prog == "headway doctor":
            read_options(options)
        raise Reached

    def make_and_stop(settings: Any, given: Any, prefix: str = "") -> Any:
        made = make(settings, given, prefix)
        if prefix:
            return made
        raise Reached

    monkeypatch.setattr(parser.Parser, "parse_args", parse_and_stop)
    monkeypatch.setattr(parser, "_make", make_and_stop)
    wrong, checked = [], 0
    for each in found:
        for action in each.parser._actions:
            where = f"{' '.join(each.verb)} {action.dest}"
            assert action.type not in (int, float), f"{where}: use a reader of cli/parser.py"
            if action.type not in READERS or not action.option_strings:
                continue
            flag = action.option_strings[0]
            for value in NEVER:  # before the verb does anything
                checked += 1
                with pytest.raises(
                    parser.UsageError, match=f"argument {flag}: (.* is not a|expected one|got an empty)"
                ) as caught:
                    parse_args(each.parser, line(each, action, value))
                assert len(str(caught.value)) < 200, value[:9]
            for value in TAKES:
                checked += 1
                said = refusal(each, line(each, action, value), capsys)
                accepted = value in TAKES and flag in TAKES[value]
                if accepted != (not said):
                    wrong.append(f"{where}={value:.9}: {said or 'accepted'}")
                elif said and (said.count("\n") != 1 or len(said) > 300):
                    wrong.append(f"{where}={value:.9}: not one sentence: {said:.300}")
    assert not wrong, "\n".join(wrong)
    assert checked > 300, "the options were found"
