"""Reads untrusted YAML files: bounded size and depth, plain data only, errors with the line number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from headway.errors import UsageError, yaml_problem
from headway.plan import checks
from headway.plan.user_files import MAX_DIGITS, read_text
from headway.yaml_loader import UniqueKeysLoader

_MAX_ENTRIES = 20_000
_MAX_DEPTH = 20


class _Loader(UniqueKeysLoader):
    """Reads 1e12 as a number, which YAML 1.1 writes as 1.0e+12."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(path: str | Path, *, what: str = "a plan file") -> Mapping[str, object]:
    """Reads a YAML file as plain data; `what` is the kind of file that is expected, for messages."""
    return parse_yaml(read_text(path, what=what), str(path))


def parse_yaml(text: str, where: str) -> Mapping[str, object]:
    """Parses plain YAML into a mapping. Refuses tags, aliases and several documents: a plan needs none of them."""
    try:
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise UsageError(
                    f"{where} is nested more than {_MAX_DEPTH} levels deep; a plan file has three"
                )
            if count > _MAX_ENTRIES:
                raise UsageError(
                    f"{where} has more than {_MAX_ENTRIES:,} entries; a plan file has a few dozen"
                )
            line = event.start_mark.line + 1
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_DIGITS and _is_int(event):
                digits = f"{len(event.value):,} digits"
                raise UsageError(f"{where}, line {line}, has a whole number of {digits}; expected at most 18")
            tag = getattr(event, "tag", None)
            if isinstance(event, yaml.AliasEvent) or tag is not None:
                what = f"the tag {tag:.80}" if tag else "an alias"
                raise UsageError(f"{where}, line {line}, has {what}; expected plain names, numbers and lists")
        data = yaml.load(text, Loader=_Loader)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError: a date that does not exist; OverflowError: a number to base 60 (1:30.5) beyond a float
        raise UsageError(f"{where} is not valid YAML: {yaml_problem(error)}") from error
    return checks.require_mapping_in(where, data)


def _is_int(event: yaml.ScalarEvent) -> bool:
    """Whether YAML reads a plain scalar as a whole number: decimal, hexadecimal, octal or binary."""
    return event.implicit[0] and re.fullmatch(r"[-+]?[0-9][0-9a-fA-Fxob_:]*", event.value) is not None
