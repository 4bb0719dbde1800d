"""The settings of a run as text, and which of them identify it: runs with the same name and these settings resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import yaml

from headway.errors import unknown_name
from headway.run.creation import config_text
from headway.run.plain import is_yaml, leaves, to_yaml

_MISSING = object()


@final
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The text of `config.yaml`, and the keys in it that do not identify a run."""

    text: str
    free: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: object, free: Collection[str] = ()) -> RunSettings:
        """Returns the settings of a script; `UsageError` if they have no key that is named in `free`.

        >>> RunSettings.of({"lr": 0.1, "data": {"workers": 4}}, free=("data.workers",)).match("lr: 0.1\\ndata: {}\\n")
        True
        """
        settings = cls(text=config_text(config), free=(free,) if isinstance(free, str) else tuple(free))
        known = [name for name, _ in leaves(settings.tree)]
        for name in settings.free:
            if not any(_is_inside(each, name) for each in known):
                raise unknown_name("setting in free", name, known)
        return settings

    @property
    def tree(self) -> dict[str, Any]:
        """The settings as a plain tree."""
        return parse(self.text) or {}

    def match(self, recorded: str) -> bool:
        """Returns whether settings as a run has recorded them are these, except for those that are free."""
        if recorded == self.text:
            return True
        if not self.free or (tree := parse(recorded)) is None:
            return False
        return to_yaml(_without(tree, self.free)) == to_yaml(_without(self.tree, self.free))

    def is_free(self, name: str) -> bool:
        """Returns whether a setting does not identify a run."""
        return any(_is_inside(name, each) for each in self.free)


def _is_inside(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def parse(text: str) -> dict[str, Any] | None:
    """Returns recorded settings as a plain tree; None if they are damaged."""
    try:
        tree = yaml.safe_load(text) if is_yaml(text) else None
    except (ValueError, yaml.YAMLError):
        return None
    return tree if isinstance(tree, dict) else None


def _without(tree: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    kept = {}
    for key, value in tree.items():
        if key in names:
            continue
        inside = [name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")]
        kept[key] = _without(value, inside) if inside and isinstance(value, Mapping) else value
    return kept


def find_differences(before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yields the single settings that differ between two plain trees, with both values; None where there is none.

    >>> list(find_differences({"lr": 0.1, "net": {"depth": 2}}, {"lr": 0.1, "net": {"depth": 3}}))
    [('net.depth', 2, 3)]
    """
    old, new = dict(leaves(before)), dict(leaves(now))
    for name in dict.fromkeys([*old, *new]):
        one, other = old.get(name, _MISSING), new.get(name, _MISSING)
        # as text: 1 is not True, and NaN equals NaN
        if one is _MISSING or other is _MISSING or repr(one) != repr(other):
            yield name, None if one is _MISSING else one, None if other is _MISSING else other
