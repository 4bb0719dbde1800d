"""Sweeps: one script, many settings, a run for each.

    settings = grid(["lr=1e-3,3e-4", "seed=1,2,3"])          # six of them; or a file: grid(["sweep.yaml"])
    arguments(["--epochs", "3"], settings[0])                # ['--epochs', '3', '--lr=1e-3', '--seed=1']
    arguments(["model.lr={lr}"], {"lr": "1e-3"})             # ['model.lr=1e-3']: for scripts with another syntax

Values are kept as text: 1e-3 reaches the script as 1e-3.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import yaml

from headway.errors import UsageError, yaml_problem
from headway.launcher.targets import parse_settings
from headway.run import Run
from headway.system import files
from headway.system.jsonlines import parse_json

MAX_SETTINGS = 10_000
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLACEHOLDER = re.compile(rf"\{{({_NAME.pattern})\}}")
_FILES = (".yaml", ".yml", ".json", ".csv")

Settings = dict[str, str]


@final
@dataclass(frozen=True, kw_only=True)
class SweepMember:
    """The place of a run in a sweep."""

    sweep: str
    """id of the sweep: that of its first run"""
    index: int
    size: int
    settings: Settings


def grid(specs: Sequence[str]) -> list[Settings]:
    """Returns every combination of the values; the last name varies fastest.

    Each spec is `NAME=V1,V2` (quote a value that holds a comma: `sizes="64,128",256`) or a file: YAML or JSON, with a
    list of values for each name (a grid) or a list of settings (taken one by one); CSV, with names in its first line.

    >>> grid(["lr=1e-3,3e-4", "seed=1,2"])[1]
    {'lr': '1e-3', 'seed': '2'}
    """
    factors = [_read(spec) if "=" not in spec and spec.endswith(_FILES) else _spec(spec) for spec in specs]
    count = 1
    for factor in factors:
        count *= len(factor)
    if count > MAX_SETTINGS:
        raise UsageError(f"the sweep has {count} settings, more than {MAX_SETTINGS}: leave some values out")
    combined: list[Settings] = []
    for parts in itertools.product(*factors):
        settings: Settings = {}
        for part in parts:
            if twice := settings.keys() & part.keys():
                raise UsageError(f"the sweep sets {min(twice)!r} twice; give all its values in one place")
            settings |= part
        combined.append(settings)
    for settings, more in itertools.groupby(sorted(combined, key=label)):
        if len(list(more)) > 1:
            raise UsageError(f"the sweep has {label(settings)} twice: give each value once")
    return combined


def arguments(args: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Returns the script's arguments with the settings: in place of `{NAME}`, or at the end as `--NAME=VALUE`."""
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        if match[1] not in settings:
            return match[0]  # the script's own braces
        used.add(match[1])
        return settings[match[1]]

    filled = [_PLACEHOLDER.sub(fill, arg) for arg in args]
    return filled + [f"--{name}={value}" for name, value in settings.items() if name not in used]


def label(settings: Mapping[str, str]) -> str:
    """Formats settings for people.

    >>> label({"lr": "1e-3", "seed": "1"})
    'lr=1e-3 seed=1'
    """
    return " ".join(f"{name}={value}" for name, value in settings.items())


def join(runs: Sequence[Run], settings: Sequence[Settings]) -> str:
    """Records in each run its place in the sweep, and returns the sweep's id."""
    sweep = runs[0].id
    for index, (run, chosen) in enumerate(zip(runs, settings, strict=True)):
        member = SweepMember(sweep=sweep, index=index, size=len(runs), settings=chosen)
        with files.storage(f"write {run.sweep_file}"):
            files.write_atomic(run.sweep_file, json.dumps(asdict(member), indent=2).encode() + b"\n")
    return sweep


def member(run: Run) -> SweepMember | None:
    """Returns the run's place in a sweep; None if it has none, or none that can be read."""
    try:
        found = parse_json(files.read_regular(run.sweep_file))
    except (OSError, ValueError):
        return None
    match found:
        case {"sweep": str(sweep), "index": int(index), "size": int(size), "settings": dict(settings)}:
            return SweepMember(sweep=sweep, index=index, size=size, settings=settings)
    return None


def _spec(spec: str) -> list[Settings]:
    name, equals, text = spec.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise UsageError(
            f"--array {spec!r:.80} is neither NAME=V1,V2 nor a file that ends in {', '.join(_FILES)}"
        )
    try:
        values = next(csv.reader([text], skipinitialspace=True), []) or [""]
    except csv.Error as error:
        raise UsageError(
            f"--array {spec!r:.80} is not a list of values: put a value with a line end or a quote into double quotes"
        ) from error
    return [{name: _value(name, value)} for value in values]


def _read(spec: str) -> list[Settings]:
    path = Path(spec)
    try:
        text = files.read_regular(path, follow=True).decode()
        if path.suffix == ".csv":
            return _rows(path, list(csv.DictReader(text.splitlines(), strict=True)))
        content = parse_json(text) if path.suffix == ".json" else parse_settings(text)
    except OSError as error:
        raise UsageError(f"the sweep {spec!r} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"the sweep {spec!r} cannot be read: {yaml_problem(error)}") from error
    except (ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the sweep {spec!r} cannot be read: {reason}; correct that line") from error
    if isinstance(content, dict):
        factors = [
            [{_name(path, name): _value(name, value)} for value in _values(path, name, values)]
            for name, values in content.items()
        ]
        return [
            dict(itertools.chain.from_iterable(part.items() for part in parts))
            for parts in itertools.product(*factors)
        ]
    return _rows(path, content)


def _rows(path: Path, rows: object) -> list[Settings]:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and row for row in rows):
        raise UsageError(
            f"the sweep {str(path)!r} has no settings: give a list of values for each name, or a list of settings"
        )
    return [{_name(path, name): _value(name, value) for name, value in row.items()} for row in rows]


def _values(path: Path, name: object, values: object) -> Iterable[Any]:
    if isinstance(values, dict) or values is None or values == []:
        raise UsageError(f"the sweep {str(path)!r} gives {name!r} no list of values")
    return values if isinstance(values, list) else [values]


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"the sweep {str(path)!r} has {name!r:.80} where a name should be")
    return name


def _value(name: object, value: object) -> str:
    """Returns a value as text."""
    if isinstance(value, list | dict) or value is None or "\0" in str(value):
        raise UsageError(f"the sweep gives {name!r} the value {value!r:.80}: give text or a number")
    text = str(value).strip()
    if not text:
        raise UsageError(f"the sweep gives {name!r} an empty value; leave out the comma, or the name")
    return text
