"""The settings that a script registers, which a resumed run compares with those that it is trained with.

A checkpoint has the current values of optimizers and schedulers, which a scheduler moves. So it also has the settings
with which they were registered. If the script registers others when the run is resumed, those of the checkpoint are
kept, and a line says so; with HEADWAY_APPLY=1 the new ones are applied where the schedule has arrived. The settings of
stages and averages are always the script's.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from headway.run.passed_over import resume_with_settings
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.settings import TrainSettings

if TYPE_CHECKING:
    from headway.train.run_state import RunState

SettingsByOwner = dict[str, dict[str, dict[str, Any]]]
"""plain values by kind, name and setting"""

_OF_PARAMETERS = ("params", "param_names", "initial_lr")
_FROM_OPTIMIZER = ("optimizer", "base_lrs", "_last_lr")
_CLOSED = (
    schedulers.LambdaLR,
    schedulers.OneCycleLR,
    schedulers.CyclicLR,
    schedulers.CosineAnnealingWarmRestarts,
)
"""schedulers whose `get_lr` depends on the number of steps alone, not on the rate before"""
_EVENT = {"event": "changes"}
_MAX_DEPTH = 5
_MAX_ITEMS = 100
_MAX_NAMED = 5
_MAX_CHARACTERS = 60


@final
@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that the script registers differently than the run that is resumed."""

    kind: str
    owner: str
    name: str
    before: Any
    now: Any


@final
class RegisteredSettings:
    """The settings of a pipeline as its script registered them. Create it before a checkpoint is restored."""

    def __init__(self, run: RunState) -> None:
        self._pipe = pipe = run.pipe
        self._groups = {
            name: list(map(_of_group, each.param_groups)) for name, each in pipe.optimizers.items()
        }
        self._owners = {name: _owners(each.param_groups) for name, each in pipe.optimizers.items()}
        self._positions = {name: list(range(len(groups))) for name, groups in self._groups.items()}
        """where each registered group is in the optimizer, which may have others by now"""
        self._attributes = {name: dict(_attributes(each)) for name, each in pipe.schedulers.items()}
        self.settings: SettingsByOwner = {
            "optimizer": {name: _collapse(groups) for name, groups in self._groups.items()},
            "scheduler": {
                name: {key: _plain(each.value) for key, each in attributes.items()}
                for name, attributes in self._attributes.items()
            },
            "dataset": {
                name: {"batch_size": size}
                for name, loader in pipe.datasets.items()
                if isinstance(size := getattr(loader, "batch_size", None), int)
            },
            "stage": {state.name: _of_stage(state) for state in run.stage_states},
            "model": {
                name: {"ema": model.ema.decay}
                for name, model in pipe.registered_models.items()
                if model.ema is not None
            },
        }
        """the settings that the run is trained with, for the next checkpoints"""

    def resume(self, saved: SettingsByOwner, *, apply: bool) -> None:
        """Reports which settings differ from those that were saved, and applies them if told; else these are kept.

        Call it on all ranks, after the checkpoint is restored.
        """
        self._match_groups()
        differences = list(_compare(saved, self.settings))
        kept = [each for each in differences if self._is_saved(each)]
        now = [each for each in differences if each not in kept]
        if apply:
            self._apply(kept)
            now, kept = differences, []
        if self._pipe.world.is_root and now:
            logger.warning(f"{self._describe(now)}: in effect from here on", extra=_EVENT)
        if self._pipe.world.is_root and kept:
            keeps, applies = ("are kept", "applies them") if len(kept) > 1 else ("is kept", "applies it")
            remedy = resume_with_settings(
                self._pipe.directory, names=list(dict.fromkeys(each.name for each in kept))
            )
            logger.warning(
                f"{self._describe(kept)}; the checkpoint's {keeps}; {remedy} {applies}", extra=_EVENT
            )
        for each in kept:
            self.settings[each.kind][each.owner][each.name] = each.before

    def _is_saved(self, difference: Difference) -> bool:
        """Returns whether a checkpoint has the setting, which then replaces the script's."""
        if difference.kind == "scheduler":
            return not self._attributes[difference.owner][difference.name].is_function
        return difference.kind == "optimizer"

    def _describe(self, differences: Sequence[Difference]) -> str:
        words = []
        for each in differences:
            of = f" of {each.kind} {each.owner!r}" if len(self.settings[each.kind]) > 1 else ""
            for name, before, now in _single(each.name.lstrip("_"), each.before, each.now):
                words.append(f"{name}{of}: {_short(now)} instead of {_short(before)}")
        return shorten_list(words, _MAX_NAMED)

    def _match_groups(self) -> None:
        """Brings the registered groups into the order of the checkpoint, in which the optimizers have theirs now."""
        for name, optimizer in self._pipe.optimizers.items():
            found = dict[int, int]()  # the positions of registered groups, by number
            for position, group in enumerate(optimizer.param_groups):
                for p in group["params"][:1]:
                    if (number := self._owners[name].get(id(p))) is not None:
                        found.setdefault(number, position)  # a hook may have split it
            if len(found) == len(self._groups[name]):  # else one has no parameters
                self._positions[name] = list(found.values())
                self._groups[name] = [self._groups[name][number] for number in found]
                self.settings["optimizer"][name] = _collapse(self._groups[name])

    def _apply(self, differences: Sequence[Difference]) -> None:
        """Applies settings, to the groups that the script has registered: hooks may have added others."""
        moved = set[str]()
        before: dict[str, Any] = {
            name: settings.get("lr") for name, settings in self.settings["optimizer"].items()
        }
        for each in differences:
            if each.kind == "scheduler":
                attribute = self._attributes[each.owner][each.name]
                setattr(attribute.owner, attribute.name, deepcopy(attribute.value))
                moved.add(each.owner)
            elif each.name == "lr":
                before[each.owner] = each.before
                moved.add(each.owner)
            else:
                groups = self._pipe.optimizers[each.owner].param_groups
                for position, settings in self._placed(each.owner):
                    groups[position][each.name] = deepcopy(settings[each.name])
        for name in moved:
            optimizer, was = self._pipe.optimizers[name], before[name]
            old = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            new = list(old)
            for number, (position, settings) in enumerate(self._placed(name)):
                new[position] = float(settings["lr"])
                if not isinstance(was, list):
                    old[position] = was
                elif number < len(was):
                    old[position] = was[number]
            _set_rates(optimizer, self._pipe.schedulers.get(name), old, new)

    def _placed(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the settings of each registered group of an optimizer, and where it is among all groups."""
        return zip(self._positions[name], self._groups[name], strict=True)


# --- what is compared


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, with the learning rate from before a scheduler moved it."""
    found = {name: value for name, value in group.items() if name not in _OF_PARAMETERS}
    if "initial_lr" in group:
        found["lr"] = group["initial_lr"]
    return {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in found.items()
    }


def _owners(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns the number of the group of each parameter, by the id of the object."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def _collapse(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each setting once if it is the same in all groups, else as a list.

    >>> _collapse([{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.9}])
    {'lr': [0.1, 0.2], 'momentum': 0.9}
    """
    found = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [_plain(group.get(name)) for group in groups]
        found[name] = values[0] if all(value == values[0] for value in values) else values
    return found


@dataclass(frozen=True, kw_only=True)
class _Attribute:
    """A setting of a scheduler."""

    owner: object
    name: str
    value: Any

    @property
    def is_function(self) -> bool:
        """Whether checkpoints leave it out."""
        values = self.value if isinstance(self.value, list | tuple) else [self.value]
        return any(map(callable, values))


def _attributes(scheduler: LRScheduler, inside: str = "") -> Iterator[tuple[str, _Attribute]]:
    """Yields the settings of a scheduler and of those that it consists of."""
    for name, value in vars(scheduler).items():
        if name == "_schedulers":
            for index, part in enumerate(value):
                yield from _attributes(part, f"{inside}{index}.")
        elif name not in _FROM_OPTIMIZER:
            attribute = _Attribute(owner=scheduler, name=name, value=value)
            yield (
                f"{inside}{name}",
                attribute if attribute.is_function else replace(attribute, value=deepcopy(value)),
            )


def _of_stage(state: Any) -> dict[str, Any]:
    limits = {"max_epochs": state.max_epochs, "max_steps": state.max_steps}
    settings = getattr(state, "settings", None)
    return limits | (asdict(settings) if isinstance(settings, TrainSettings) else {})


def _compare(saved: SettingsByOwner, now: SettingsByOwner) -> Iterator[Difference]:
    """Yields the settings that both have and that differ; names and groups are compared where they are loaded."""
    for kind, owners in now.items():
        for owner, settings in owners.items():
            before = saved[kind].get(owner, {})
            for name in [name for name in settings if name in before]:
                one, other = before[name], settings[name]
                if one != other and repr(one) != repr(other):  # NaN is not equal to itself
                    yield Difference(kind=kind, owner=owner, name=name, before=one, now=other)


def _single(name: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields what differs within a setting: the values that a function uses, or parts of a schedule."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        for key in now:
            if before[key] != now[key]:
                yield from _single(key, before[key], now[key])
    elif _has_mappings(before) and _has_mappings(now) and len(before) == len(now):
        for one, other in zip(before, now, strict=True):
            yield from _single(name, one, other)
    elif before != now:
        yield name, before, now


def _has_mappings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


def _plain(value: object, depth: int = 0) -> Any:
    """Returns a value as a checkpoint can have it; a function by its name and the values that it uses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic | Tensor | np.ndarray):
        return value.tolist() if math.prod(value.shape) <= _MAX_ITEMS else "..."
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value[:_MAX_ITEMS]]
    if isinstance(value, partial):
        return {"function": _plain(value.func), "with": _plain([*value.args, value.keywords], depth + 1)}
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value).nonlocals
        return {"function": value.__qualname__} | {
            name: _plain(each, depth + 1) for name, each in used.items()
        }
    return getattr(value, "__qualname__", type(value).__qualname__)


# --- how it is applied


def _set_rates(
    optimizer: Optimizer, scheduler: LRScheduler | None, before: Sequence[Any], new: Sequence[float]
) -> None:
    """Sets the learning rate of each group to that of its schedule, which began with another, where it has arrived."""
    groups = optimizer.param_groups
    for group, rate in zip(groups, new, strict=True):
        if "initial_lr" in group:
            group["initial_lr"] = _like(group["initial_lr"], rate)
    rates = list(new)
    if scheduler is not None:
        _set_base(scheduler, new)
        found = _rates_now(scheduler)
        # a schedule that builds on the last rate is in proportion to the first one
        scaled = [float(g["lr"]) * n / b if b else n for g, n, b in zip(groups, new, before, strict=True)]
        rates = scaled if found is None else [*found, *scaled[len(found) :]]  # a hook may have added groups
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = _like(group["lr"], float(rate))
    if scheduler is not None:
        scheduler._last_lr = list(map(float, rates))


def _like(old: Any, rate: float) -> Any:
    """Returns a learning rate: a tensor stays the same object, which a compiled step may have captured."""
    return old.fill_(rate) if isinstance(old, Tensor) else rate


def _set_base(scheduler: LRScheduler, new: Sequence[float]) -> None:
    for part in getattr(scheduler, "_schedulers", ()):
        _set_base(part, new)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = list(new[: len(scheduler.base_lrs)])


def _rates_now(scheduler: LRScheduler) -> list[Any] | None:
    """Returns the learning rates after the steps so far, if they do not depend on those before."""
    if isinstance(scheduler, schedulers.SequentialLR):
        return _rates_now(scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)])
    if hasattr(scheduler, "_get_closed_form_lr"):
        return list(scheduler._get_closed_form_lr())
    if isinstance(scheduler, _CLOSED):
        with schedulers._enable_get_lr_call(scheduler):
            return list(scheduler.get_lr())
    return None
