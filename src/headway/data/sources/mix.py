"""`Mix`: several datasets in one stream, in exact proportions that may change at given steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import final

from headway.data.catalog.catalog import Catalog
from headway.data.catalog.shard_files import ShardSpec
from headway.data.order.timeline import apply_weights, check_names, to_whole_numbers
from headway.errors import UsageError
from headway.system.log import logger


@final
class Mix:
    """Datasets and their weights: `ShardLoader` reads them in these proportions.

        mix = hw.data.Mix({"laion": 0.5, "datacomp": 0.3}, shards={"laion": "/data/laion/*.tar", "datacomp": paths})
        mix = hw.data.Mix({"/data/laion": 1, "/data/datacomp": 2}, schedule=[(1000, {"/data/laion": 3})])

    Weights need not add up to one. `shards` gives a directory, a pattern or a list of files for each name; without it,
    the names themselves are directories, patterns, or names in the `catalog` (by default, `Catalog()`). `schedule`
    changes weights at given steps; names that it omits keep theirs.

    Datasets are identified by name; their order does not matter. A run resumes with the datasets that it was saved
    with, unless the change is stated: `added` names datasets that the checkpoint may lack, `removed` datasets that only
    the checkpoint may have. Then all others continue where they were, and the weights and the schedule given here apply
    from there on.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        shards: Mapping[str, ShardSpec] | None = None,
        catalog: Catalog | None = None,
        schedule: Sequence[tuple[int, Mapping[str, float]]] = (),
        added: Collection[str] = (),
        removed: Collection[str] = (),
    ) -> None:
        if not isinstance(weights, Mapping):
            raise UsageError(
                f'a Mix needs a weight for each name, as in Mix({{"laion": 0.5}}), not {weights!r}'
            )
        self.weights = {str(name): float(weight) for name, weight in weights.items()}
        to_whole_numbers(self.weights)
        self.shards: dict[str, ShardSpec] = {name: (shards or {}).get(name, name) for name in self.weights}
        check_names(shards or {}, self.weights)
        self.catalog = catalog
        self.added, self.removed = _names("added", added), _names("removed", removed)
        check_names(self.added, self.weights)
        if self.removed & self.weights.keys():
            raise UsageError(
                f"removed={sorted(self.removed & self.weights.keys())} are datasets of this mix: remove their weights"
            )
        steps = [step for step, _ in schedule]
        if any(step < 1 for step in steps) or steps != sorted(set(steps)):
            raise UsageError(f"the steps of a schedule must be increasing numbers from 1 on, not {steps}")
        self.schedule: list[tuple[int, dict[str, float]]] = []
        current = self.weights
        for step, changes in schedule:
            current = apply_weights(current, changes)
            self.schedule.append((step, current))

    def warn_of_edits(self, saved: Sequence[Mapping[str, float]], current: Mapping[str, float]) -> None:
        """Warns if this mix has weights that are not in the checkpoint: the `saved` ones apply, `current` first."""
        known = [_proportions(weights) for weights in saved]
        given = (self.weights, *(weights for _, weights in self.schedule))
        edited = next((weights for weights in given if _proportions(weights) not in known), None)
        if edited is not None:
            names = [name for name in edited if edited[name] != current[name]]
            edits = ", ".join(f"{name} is {current[name]:g} and not {edited[name]:g}" for name in names)
            logger.warning(
                f"the weights of the mix are those of the checkpoint: {edits}; to change them from here on, call "
                "set_weights() of the loader once it is restored"
            )


def _proportions(weights: Mapping[str, float]) -> list[int]:
    """Returns the weights as the smallest whole numbers, in the order of the names."""
    numbers = to_whole_numbers({name: weights[name] for name in sorted(weights)})
    return [number // math.gcd(*numbers) for number in numbers]


def _names(argument: str, names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise UsageError(f"{argument}={names!r}: give a list of names, [{names!r}]")
    return frozenset(map(str, names))
