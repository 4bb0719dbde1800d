"""Options for the settings of a job, named as in sbatch, and the target that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headway.cli.parser import Parser, whole
from headway.errors import UsageError
from headway.launcher.targets import ClusterTarget, Slurm, read_target, target_fields


def add_target(parser: Parser, *, leave_out: tuple[str, ...] = ()) -> None:
    """Adds --on and an option for each setting of a SLURM job, except those in `leave_out`."""
    parser.add_argument("--on", metavar="FILE", help="settings from a YAML file; options override them")
    settings = parser.add_argument_group("settings of the job, as sbatch calls them")
    for each in target_fields(Slurm):
        if each.name not in leave_out:
            _add(settings, each.name, each.type, each.metadata["help"])


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, help: str) -> None:
    """Adds the option of a setting; an option that is not given is absent from the result."""
    flag = f"--{name.replace('_', '-')}"
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
    if kind == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif name == "nodes":
        group.add_argument(flag, type=_number_or_range, metavar="N", **common)
    elif kind in ("int", "int | None"):
        group.add_argument(flag, type=whole, metavar="N", **common)
    elif kind.startswith("Mapping"):
        group.add_argument(flag, action="append", metavar="NAME=VALUE", **common)
    elif kind.startswith("tuple"):
        group.add_argument(flag, action="append", metavar="TEXT", **common)
    else:
        group.add_argument(flag, metavar="TEXT", **common)


def _number_or_range(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def read_options(options: argparse.Namespace, **defaults: Any) -> ClusterTarget:
    """Returns the target of a command line; `defaults` are for settings that neither it nor the file of --on has."""
    values: dict[str, Any] = {}
    given = {each.name: getattr(options, each.name) for each in target_fields(Slurm) if each.name in options}
    if options.on is not None:
        found = read_target(Path(options.on))
        if not isinstance(found, ClusterTarget):
            raise UsageError(
                f"{options.on} describes {found.kind}; this needs a cluster, such as 'kind: slurm'"
            )
        if not isinstance(found, Slurm):  # another scheduler: the options are SLURM's
            if given:
                raise UsageError(f"--{min(given).replace('_', '-')} is for SLURM: set it in {options.on}")
            return found
        values = found.to_dict()
    for name in ("env", "extra"):
        if name in given:
            given[name] = {**values.get(name, {}), **dict(_pair(name, text) for text in given[name])}
    return Slurm.from_dict({**defaults, **values, **given})


def _pair(option: str, text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not equals and option == "env":
        raise UsageError(f"--env {text!r:.80}: write NAME=VALUE")
    return name, value if equals else True
