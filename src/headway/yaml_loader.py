"""The YAML loader of the files that people write: settings, sweeps and plans."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError


class UniqueKeysLoader(yaml.SafeLoader):
    """Refuses a name that is given twice in a mapping: YAML forbids it, and PyYAML silently drops the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise ConstructorError(None, None, "a name is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node
