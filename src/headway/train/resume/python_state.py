"""State that training keeps in Python: attributes, module globals, closures and random number generators.

No checkpoint has it unless it is registered. It is looked for in stages, callbacks, the pipeline, modules, optimizers,
schedulers and datasets, and in the modules of the program. What is looked for, and how much of it, is bounded.
"""

from __future__ import annotations

import itertools
import random
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.resume import generators
from headway.train.resume.assignments import Assignments, default_arguments
from headway.train.resume.generators import OwnGenerator
from headway.train.resume.state import StatefulObject

if TYPE_CHECKING:
    from headway.train.run_state import RunState

_MOST_SLOTS = 5000
_MOST_ITEMS = 100
_MOST_VALUES = 50_000
_MOST_BYTES = 1 << 20
_UNKNOWN = object()
_DEEPEST, _DEEPEST_ITEM = 5, 3
_Plain = int | float | complex | str | bytes | bool | np.generic
_CONTAINERS = (list, dict, set, deque)
_ITERATORS: tuple[type, ...] = (
    itertools.count, itertools.cycle, itertools.chain, itertools.islice, enumerate, filter, map, zip,
    type(iter([])), type(iter(range(0))), GeneratorType, _BaseDataLoaderIter,
)  # fmt: skip
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)
_MODULES_OWN = frozenset(vars(nn.Module())) | {"training"}
_OPTIMIZERS_OWN = frozenset({"state", "param_groups", "defaults"})
_PIPELINES_OWN = frozenset({"config", "name"})


@final
@dataclass(frozen=True, kw_only=True)
class Slot:
    """An attribute, variable or closure cell, and what was in it."""

    name: str
    """its own, as code has it"""
    value: object
    """kept, since Python reuses ids"""
    content: object
    empty: bool = False
    """whether there was nothing in it: noted, since a container may have been filled since"""


@final
class PythonState:
    """Finds state that training changes and no checkpoint has."""

    def __init__(self, run: RunState) -> None:
        self._run, self._pipe = run, run.pipe
        self._seen: dict[str, Slot] = {}
        self._named = set[str]()
        self._assignments: Assignments | None = None

    def begin(self) -> None:
        """Notes what there is before training."""
        self._seen = self._walk().slots

    def note(self) -> None:
        """Notes what is there for the first time."""
        for path, slot in self._walk().slots.items():
            if _may_be_cache(self._seen.get(path), slot):
                self._seen[path] = slot

    def changed(self) -> list[str]:
        """Returns what has changed since it was first seen, each once.

        What was empty or missing, or has only more keys, may be a cache, which its uses fill; it counts if it changes
        after that.
        """
        walk, found = self._walk(), dict[str, None]()
        for path, slot in walk.slots.items():
            before = self._seen.get(path)
            if _may_be_cache(before, slot):
                self._seen[path] = slot
            elif before is not None and path not in self._named and self._differs(before, slot):
                self._named.add(path)
                found[next((each[:-1] for each in walk.savable if path.startswith(each)), path)] = None
        return list(found)

    def _differs(self, before: Slot, now: Slot) -> bool:
        if before.content == now.content or not (_is_known(before.content) and _is_known(now.content)):
            return False
        return self._carries(before, now)

    def _carries(self, before: Slot, now: Slot) -> bool:
        """Whether a later step depends on a value that has changed, rather than only on what it assigns itself."""
        if isinstance(now.value, OwnGenerator):
            return now.value is before.value
        if now.value is before.value:
            if isinstance(now.value, dict):
                return self._code().carry_items(now.name, all_new=_all_replaced(before.content, now.content))
            return not isinstance(now.value, (list, deque, *_ITERATORS)) or self._code().read(now.name)
        return self._code().carry(now.name)

    def _code(self) -> Assignments:
        if self._assignments is None:
            self._assignments = Assignments(self._functions())
        return self._assignments

    def _functions(self) -> Iterator[FunctionType]:
        """Yields the functions of the program, and of the classes of what it has registered."""
        owners: list[Any] = [*self._program(), *(type(each) for each in self._objects())]
        for owner in dict.fromkeys(owners):
            scopes = [owner, *owner.__mro__] if isinstance(owner, type) else [owner]
            for value in [value for scope in scopes for value in list(vars(scope).values())]:
                if isinstance(value, type) and is_users(value):
                    yield from filter(None, map(_function, vars(value).values()))
                elif function := _function(value):
                    yield function

    def _program(self) -> list[ModuleType]:
        """Returns the modules of the program that the code of what it has registered can reach."""
        loaders = self._pipe.datasets.values()
        known = [*self._objects(), *loaders, *(getattr(loader, "dataset", None) for loader in loaders)]
        return _reachable_modules(type(each).__module__ for each in known)

    def _objects(self) -> list[object]:
        run, pipe = self._run, self._pipe
        modules = [part for model in pipe.registered_models.values() for part in model.bare.modules()]
        return [pipe, *pipe.stages, *run.callbacks, *pipe.optimizers.values(), *modules]

    def _walk(self) -> _Walk:
        walk = _Walk(self._saved())
        pipe = self._pipe
        for stage in pipe.stages:
            walk.visit_attributes(stage.name, stage, skip={"_loop", "pipe"})
        for callback in self._run.callbacks:
            walk.visit_attributes(type(callback).__name__, callback)
        walk.visit_attributes(type(pipe).__name__, pipe, skip=_PIPELINES_OWN)
        walk.visit_value("config", pipe.config)
        for name, model in pipe.registered_models.items():
            for key, module in model.bare.named_modules():
                walk.visit_module(f"{name}.{key}" if key else name, module)
        for name, optimizer in pipe.optimizers.items():
            walk.visit_optimizer(name, optimizer)
        for name, scheduler in pipe.schedulers.items():
            walk.visit_functions(name, list(_scheduler_parts(scheduler)))
        for name, loader in pipe.datasets.items():
            walk.visit_loader(name, loader)
        for module in self._program():
            walk.visit_variables(_name_of(module), module)
        for name, model in pipe.registered_models.items():  # last: a large model has thousands
            for key, module in model.bare.named_modules():
                walk.visit_numbers(f"{name}.{key}" if key else name, module)
        return walk

    def _saved(self) -> set[int]:
        """Returns the ids of what checkpoints have, and of what headway owns."""
        run, pipe = self._run, self._pipe
        owned: list[object] = [pipe, run, pipe.world, pipe.history]
        owned += [value for name, value in vars(pipe).items() if name not in _PIPELINES_OWN]
        owned += [*pipe.stages, *run.callbacks, *pipe.optimizers.values(), *pipe.schedulers.values()]
        for model in pipe.registered_models.values():
            owned += [model.wrapped, *model.bare.modules(), *model.bare.parameters(), *model.bare.buffers()]
        for loader in pipe.datasets.values():
            owned += [loader, *generators.find(loader).values()]
        for thing in (*run.registered_state.values(), *run.rank_states.values()):
            owned += list(_reachable(thing))
        return {id(each) for each in owned if not isinstance(each, _Plain | None)}


@final
class _Walk:
    """Visits objects, each once, and collects their slots by path."""

    def __init__(self, known: set[int]) -> None:
        self.slots: dict[str, Slot] = {}
        self.savable = list[str]()
        """paths of objects that could be registered as they are"""
        self._visited, self._contents = known, _Contents()

    def visit_attributes(self, path: str, thing: object, *, skip: Iterable[str] = ()) -> None:
        """Visits the attributes of an object and of the user's classes of it."""
        self._attributes(path, thing, skip, depth=0)

    def visit_value(self, name: str, value: object) -> None:
        self._slot(name, name, value, depth=0)

    def visit_module(self, path: str, module: nn.Module) -> None:
        """Visits the attributes of a registered module that are not part of its state, and its hooks."""
        if not _saves_more(module):
            self._attributes(path, module, _MODULES_OWN, depth=0)
        for holder in (module, *vars(module)["_parameters"].values()):
            for name in _HOOKS:
                for hook in list((getattr(holder, name, None) or {}).values()):
                    self._slot(f"{path}.{name.strip('_')}", name, hook, depth=1)

    def visit_numbers(self, path: str, module: nn.Module) -> None:
        """Visits the settings of a library's module, such as the rate of a dropout, which training may lower."""
        if not (is_users(type(module)) or _saves_more(module)):
            for name, value in vars(module).items():
                if isinstance(value, int | float) and name not in _MODULES_OWN:
                    self._slot(f"{path}.{name}", name, value, depth=0)

    def visit_optimizer(self, path: str, optimizer: Optimizer) -> None:
        own = vars(optimizer)
        if any(isinstance(value, OwnGenerator) for value in own.values()) or is_users(type(optimizer)):
            saved = optimizer.state_dict()
            skipped = {
                name for name, value in own.items() if name.startswith("_") or _is_saved_by(saved, value)
            }
            self._attributes(path, optimizer, _OPTIMIZERS_OWN | skipped | saved.keys(), depth=0)

    def visit_functions(self, path: str, functions: Iterable[object]) -> None:
        """Visits what functions close over, and their default arguments."""
        for function in functions:
            self._function(path, function, depth=0)

    def visit_loader(self, path: str, loader: object) -> None:
        """Visits a loader; of its dataset's containers only the generators, since others may be caches."""
        parts = {"": loader} if is_users(type(loader)) and not isinstance(loader, StatefulObject) else {}
        for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
            part = getattr(loader, name, None)
            if part is not None and not isinstance(part, StatefulObject):
                parts[name] = part
        for name, part in parts.items():
            where = f"{path}.{name}" if name else path
            if isinstance(part, FunctionType | MethodType | partial):
                self._function(where, part, depth=0)
            else:
                self._attributes(where, part, (), depth=0, caches=name in ("", "dataset"))

    def visit_variables(self, path: str, module: ModuleType) -> None:
        """Visits the variables of a module of the program, and the attributes of its classes."""
        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                if value.__module__ == module.__name__:
                    self._class(f"{path}.{name}", value, depth=1)
            elif isinstance(value, FunctionType | partial):
                self._function(f"{path}.{name}", value, depth=1)
            elif not (name.startswith("__") or isinstance(value, ModuleType)):
                self._slot(f"{path}.{name}", name, value, depth=1)

    def _attributes(
        self, path: str, thing: object, skip: Iterable[str], *, depth: int, caches: bool = False
    ) -> None:
        self._visited.add(id(thing))
        users = is_users(type(thing))
        if users:
            self._class(path, type(thing), depth)  # first: an attribute of the object hides that of its class
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if name in skip or not (users or isinstance(value, OwnGenerator)):
                continue
            if caches and isinstance(value, Tensor | np.ndarray):
                continue
            if caches and isinstance(value, _CONTAINERS):
                for place, generator in enumerate(
                    each for each in _objects_in(value) if isinstance(each, OwnGenerator)
                ):
                    self._slot(f"{path}.{name}[{place}]", name, generator, depth)
            else:
                self._slot(f"{path}.{name}", name, value, depth)

    def _class(self, path: str, kind: type, depth: int) -> None:
        """Visits the attributes of a user's class and its bases, and what their methods close over."""
        for each in kind.__mro__:
            if id(each) in self._visited or not is_users(each):
                continue
            self._visited.add(id(each))
            for name, value in list(vars(each).items()):
                if function := _function(value):
                    self._function(path, function, depth)
                elif not (name.startswith("__") or isinstance(value, type)):
                    self._slot(f"{path}.{name}", name, value, depth)

    def _function(self, path: str, function: object, depth: int) -> None:
        if depth > _DEEPEST or id(function) in self._visited:
            return
        if isinstance(function, partial):
            self._visited.add(id(function))
            self._function(path, function.func, depth + 1)
            return
        if isinstance(function, MethodType):
            self._slot(path, path.rpartition(".")[2], function.__self__, depth + 1)
            function = function.__func__
        function = _function(function)
        if function is None or not _is_users_module(function.__module__):
            return
        self._visited.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:  # it is not assigned yet
                continue
            self._slot(f"{path}.{name}", name, value, depth + 1)
        for name, value in (*default_arguments(function).items(), *list(vars(function).items())):
            self._slot(f"{path}.{name}", name, value, depth + 1)

    def _slot(self, path: str, name: str, value: object, depth: int) -> None:
        if len(self.slots) >= _MOST_SLOTS or depth > _DEEPEST or isinstance(value, type | ModuleType):
            return
        if isinstance(value, FunctionType | MethodType | partial):
            self._function(path, value, depth)
            return
        if not isinstance(value, _Plain | tuple | frozenset | None):
            if id(value) in self._visited or _is_metric(value):
                return
            self._visited.add(id(value))
        if isinstance(value, nn.Module | Optimizer | LRScheduler | torch.amp.GradScaler):
            self.slots[path] = Slot(name=name, value=value, content=self._contents.of_part(value))
        elif isinstance(value, OwnGenerator | Tensor | np.ndarray | _Plain | tuple | frozenset | None):
            self._note(path, name, value)
        elif isinstance(value, _ITERATORS):
            self.slots[path] = Slot(name=name, value=value, content=_position(value))
        elif isinstance(value, _CONTAINERS):
            self._note(path, name, value)
            for place, each in enumerate(_objects_in(value)):
                self._slot(f"{path}[{place}]", name, each, depth + 1)
        elif is_users(type(value)):
            if isinstance(value, StatefulObject):
                self.savable.append(f"{path}.")
            self._attributes(path, value, (), depth=depth + 1)

    def _note(self, path: str, name: str, value: object) -> None:
        content = self._contents.of(value)
        self.slots[path] = Slot(name=name, value=value, content=content, empty=_is_empty(value))


@final
class _Contents:
    """What tells whether values have changed, for as many values as a save may look at."""

    def __init__(self) -> None:
        self.left = _MOST_VALUES

    def of(self, value: object, depth: int = 0) -> object:
        """Returns the content of a value; of tensors identity and version, which need no device."""
        self.left -= 1
        if self.left < 0:
            return _UNKNOWN
        if depth > _DEEPEST_ITEM:
            return None
        match value:
            case Tensor():
                if value.grad_fn is not None and depth:
                    return "activation"  # not kept from step to step, since its graph is freed
                return id(value), 0 if value.is_inference() else value._version
            case np.ndarray():
                part = value.reshape(-1)[: _MOST_BYTES // max(1, value.itemsize)]
                return value.shape, None if value.dtype.hasobject else zlib.crc32(part.tobytes())
            case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
                return repr(generators.state_of(value)) if not depth else None  # it has a slot of its own
            case float() | complex() | np.generic():
                return repr(value)  # nan equals nan
            case set() | frozenset():
                return len(value), hash(frozenset(value))
            case dict():
                parts = islice(value.items(), _items_at(depth))
                return {"len": len(value)} | {key: self.of(part, depth + 1) for key, part in parts}
            case list() | tuple() | deque():
                ends = [value[place] for place in _ends(len(value), _items_at(depth))]
                return len(value), [self.of(part, depth + 1) for part in ends]
        return value if isinstance(value, _Plain) else None

    def of_part(self, part: nn.Module | Optimizer | LRScheduler | torch.amp.GradScaler) -> object:
        """Returns the content of a part of training that is not registered."""
        if isinstance(part, nn.Module):
            return [self.of(each) for each in (*part.parameters(), *part.buffers())]
        return self.of(part.state_dict())


def _items_at(depth: int) -> int:
    """Returns how many items of a container are looked at."""
    return 10 if depth else _MOST_ITEMS


def _ends(length: int, most: int) -> Iterable[int]:
    """Returns the places of the first and last items of a list."""
    if length <= most:
        return range(length)
    return [*range(most // 2), *range(length - most // 2, length)]


def _is_known(content: object) -> bool:
    """Whether a content was looked at as a whole."""
    if isinstance(content, dict):
        return all(map(_is_known, content.values()))
    if isinstance(content, list | tuple):
        return all(map(_is_known, content))
    return content is not _UNKNOWN


def _only_grew(before: object, now: object) -> bool:
    """Whether a dict has new keys and no other change."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return False
    return now["len"] > before["len"] and all(now.get(key) == before[key] for key in before if key != "len")


def _may_be_cache(before: Slot | None, now: Slot) -> bool:
    """Whether something has been made or filled, rather than changed."""
    return before is None or before.empty or _only_grew(before.content, now.content)


def _all_replaced(before: object, now: object) -> bool:
    """Whether a dict has the same keys and no item that it had."""
    if not (isinstance(before, dict) and isinstance(now, dict)) or before.keys() != now.keys():
        return False
    return all(now[key] != before[key] for key in before if key != "len")


def _position(iterator: Any) -> object:
    """Returns what tells whether an iterator has advanced; of one that does not tell, that it has."""
    match iterator:
        case itertools.count():
            return repr(iterator)
        case _BaseDataLoaderIter():
            return iterator._num_yielded
        case GeneratorType() if iterator.gi_frame is None or not _is_users_file(iterator.gi_code.co_filename):
            return None  # it has ended, or is that of a loader
    return object()


def _saves_more(module: nn.Module) -> bool:
    """Whether a module has a state that it saves itself."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _is_saved_by(saved: dict[str, Any], value: object) -> bool:
    """Whether this is an optimizer within another one, whose state dict has its tensors."""
    if not isinstance(value, Optimizer):
        return False
    known = {id(each) for each in _reachable(saved)}
    states = [state for state in value.state.values() if isinstance(state, dict)]
    return all(id(each) in known for state in states for each in state.values() if isinstance(each, Tensor))


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (*_CONTAINERS, tuple)) and len(value) == 0)


def _is_metric(value: object) -> bool:
    """Whether this is a metric for `add_metric`, which each epoch or validation resets."""
    return isinstance(value, EpochMetric) and not isinstance(value, type)


def _parts(value: Any, most: int = _MOST_ITEMS) -> list[Any]:
    return list(islice(value.values() if isinstance(value, dict) else value, most))


def _objects_in(value: Any, depth: int = 0) -> Iterator[object]:
    """Yields the items of a container whose own attributes may change, and generators."""
    for part in _parts(value, _items_at(depth)):
        if isinstance(part, (*_CONTAINERS, tuple)):
            if depth < _DEEPEST_ITEM:
                yield from _objects_in(part, depth + 1)
        elif isinstance(part, OwnGenerator) or not isinstance(part, _Plain | Tensor | np.ndarray | None):
            yield part


def _reachable(thing: object) -> Iterator[object]:
    """Yields an object and what it holds."""
    seen, left = set[int](), [thing]
    while left and len(seen) < _MOST_VALUES:
        each = left.pop()
        if id(each) in seen or isinstance(each, _Plain | type | ModuleType | None):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, (*_CONTAINERS, tuple)):
            left += _parts(each)
        elif not isinstance(each, Tensor | np.ndarray):
            left += list(getattr(each, "__dict__", {}).values())[:_MOST_ITEMS]


def _scheduler_parts(scheduler: object, depth: int = 0) -> Iterator[object]:
    """Yields the functions of a scheduler, which it does not save, and of those that it consists of."""
    for value in vars(scheduler).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, LRScheduler) and depth < _DEEPEST:
                yield from _scheduler_parts(part, depth + 1)
            elif isinstance(part, FunctionType | MethodType | partial):
                yield part


def _function(value: object) -> FunctionType | None:
    """Returns the function of a method, property or decorated function."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, cached_property):
        value = value.func
    return value if isinstance(value, FunctionType) else None


# --- which code is the user's


def is_users(kind: type) -> bool:
    """Whether a class belongs to the program, and not to a library."""
    return _is_users_module(kind.__module__)


def _reachable_modules(starts: Iterable[str]) -> list[ModuleType]:
    """Returns the script, these modules, and the modules that they import, as far as they belong to the program."""
    found: dict[str, ModuleType] = {}
    waiting = ["__main__", *starts]
    while waiting:
        name = waiting.pop()
        if name not in found and _is_users_module(name):
            found[name] = sys.modules[name]
            for value in list(vars(found[name]).values()):
                waiting += _modules_behind(value)
    return list(found.values())


def _modules_behind(value: object) -> Iterator[str]:
    """Yields the modules that a variable leads to, and those that a function imports when it is called."""
    if isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, FunctionType):
        yield value.__module__
        yield from value.__code__.co_names
    elif isinstance(value, type):
        yield value.__module__
        for method in list(vars(value).values()) if is_users(value) else ():
            if isinstance(method, FunctionType):
                yield from method.__code__.co_names
    else:
        yield type(value).__module__


def _name_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return Path(file).stem if module.__name__ == "__main__" and file else module.__name__


def _is_users_module(name: str | None) -> bool:
    module = sys.modules.get(name or "")
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return name == "__main__"  # a notebook
    return _is_users_file(file)


@cache
def _is_users_file(file: str) -> bool:
    paths = sysconfig.get_paths()
    libraries = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries += [sys.prefix, str(Path(__file__).parents[2])]
    return not any(Path(file).is_relative_to(each) for each in libraries)
