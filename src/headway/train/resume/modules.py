"""What training may change in the modules of a model besides values: frozen parameters, modes, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.model.modes import restore_modes

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline


def pack(model: nn.Module) -> dict[str, Any]:
    """Returns the names of frozen parameters, of modules in eval mode, and of buffers that are there or None."""
    buffers = {path: getattr(module, name) for path, module, name in _buffers(model)}
    return {
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "eval": [name for name, module in model.named_modules() if not module.training],
        "buffers": [path for path, buffer in buffers.items() if buffer is not None],
        "none": [path for path, buffer in buffers.items() if buffer is None],
    }


def load(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Restores flags and modes; returns the parameters that the script has frozen or unfrozen differently."""
    frozen, evaluated = set(saved["frozen"]), set(saved["eval"])
    changed = [name for name, p in model.named_parameters() if p.requires_grad is (name in frozen)]
    for name in changed:
        model.get_parameter(name).requires_grad_(name not in frozen)
    restore_modes([(module, name not in evaluated) for name, module in model.named_modules()])
    return changed


def make_buffers(
    model: nn.Module,
    saved: Mapping[str, Any],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    device: torch.device,
) -> list[str]:
    """Makes empty buffers of the saved dtypes and shapes where those of a new model differ; returns their names.

    A forward pass may create a buffer, or let it grow; `tensors` has the dtypes and shapes of the saved ones.
    """
    here = {path: getattr(module, name) for path, module, name in _buffers(model)}
    modules, made = dict(model.named_modules()), list[str]()
    for path in [*saved["buffers"], *saved["none"]]:
        prefix, _, name = path.rpartition(".")
        buffer, wanted = here.get(path), tensors.get(path)
        has = None if buffer is None else (buffer.dtype, tuple(buffer.shape))
        if has == wanted or prefix not in modules or name in modules[prefix]._parameters:
            continue
        empty = None if wanted is None else torch.empty(wanted[1], dtype=wanted[0], device=device)
        modules[prefix].register_buffer(name, empty)
        made.append(path)
    return made


@final
class ModelShapes:
    """The shapes of parameters that a resumed run has when it restores them: those of the script and of `pre_stage`."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._expected: dict[str, tuple[int, ...] | None] = {}

    def begin(self) -> None:
        """Notes the shapes with which training begins, after `pre_run`."""
        self._expected = self._find()

    @contextmanager
    def in_pre_stage(self) -> Iterator[None]:
        """Surrounds a `pre_stage`, which a resumed run calls again, so it may make other parameters."""
        before = self._find()
        yield
        after = self._find()
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                self._expected[name] = after.get(name)

    def check(self) -> None:
        """Names, once, the parameters that the hooks of a resumed run would not make."""
        here = self._find()
        changed = [name for name in {**self._expected, **here} if here.get(name) != self._expected.get(name)]
        if changed and self._pipe.world.is_root:
            logger.warning(
                f"parameters have other shapes than pre_run and pre_stage made ({shorten_list(changed)}): a resume "
                "calls only these hooks before it loads the checkpoint; change the shapes there"
            )
        self._expected = here

    def _find(self) -> dict[str, tuple[int, ...] | None]:
        return {
            f"{name}.{key}": None if is_lazy(p) else tuple(p.shape)
            for name, model in self._pipe.registered_models.items()
            for key, p in model.bare.named_parameters()
        }


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the path, module and name of each buffer that is part of the state."""
    for prefix, module in model.named_modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name, module, name
