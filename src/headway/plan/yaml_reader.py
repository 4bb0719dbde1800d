"""Reads YAML files that may come from anybody: bounded size and depth, plain data only, errors with the line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from headway.errors import UsageError, yaml_problem
from headway.plan import checks

_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 20_000
_MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    """Reads 1e12 as a number, which YAML 1.1 writes as 1.0e+12."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(path: str | Path) -> Mapping[str, object]:
    """Reads a plan file as plain data."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)  # a device or a pipe has no size, and may be endless
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{file} has more than {_MAX_BYTES:,} bytes; a plan file has a few hundred")
        text = content.decode()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; give the path of a plan file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_yaml(text, str(file))


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
            tag = getattr(event, "tag", None)
            if isinstance(event, yaml.AliasEvent) or tag is not None:
                what = f"the tag {tag:.80}" if tag else "an alias"
                line = event.start_mark.line + 1
                raise UsageError(f"{where}, line {line}, has {what}; expected plain names, numbers and lists")
        data = yaml.load(text, Loader=_Loader)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise UsageError(f"{where} is not valid YAML: {yaml_problem(error)}") from error
    return checks.require_mapping_in(where, data)
