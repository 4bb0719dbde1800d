"""State that training changes but no checkpoint has: modules that are not registered, buffers that are not persistent,
state of Python, generators that a dataset owns, and gradients that are accumulated in a user's loop. And buffers that
checkpoints have, but with NaN."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.data import DataLoader
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.metrics.epoch_metrics import EpochMetric
from headway.train.resume import generators
from headway.train.resume.python_state import PythonState

if TYPE_CHECKING:
    from headway.train.run_state import RunState
    from headway.train.stage import Stage

_MOST_ELEMENTS = 1 << 20
"""elements of a buffer that is watched: a larger one is a table or a mask"""
_MOST_PARTS = 100
"""items of a container that are searched: a list of a million losses has no modules"""


@final
class UnsavedState:
    """Warns once about such state, by name; about a buffer only if it changes, since most of them are constants."""

    def __init__(self, run: RunState) -> None:
        self._run, self._pipe = run, run.pipe
        self._before: dict[str, Tensor] = {}
        self._named = set[str]()  # buffers
        self._updates: dict[str, tuple[int, object]] = {}  # by optimizer: in which step, with which gradients
        self._gradients_named = self._nan_named = False
        self._python_state = PythonState(run)

    def begin(self) -> None:
        """Copies buffers before training, to compare them later; warns about generators."""
        self._before = self._copies()
        self._python_state.begin()
        if any(stage.loop_is_users for stage in self._run.stage_states):
            for name, optimizer in self._pipe.optimizers.items():
                optimizer.register_step_post_hook(partial(self._note_update, name))
        for name, loader in self._pipe.datasets.items():
            own = generators.find(loader, samples=True) if isinstance(loader, DataLoader) else {}
            if found := [path for path in own if path.startswith("dataset.")]:
                self._warn(
                    f"dataset {name!r} has random number generators of its own ({shorten_list(found)}), whose state is "
                    "not saved: a resumed run draws other numbers; draw from torch, numpy.random or random instead"
                )

    def after_step(self) -> None:
        """Notes what the first step has made, so that the next save can tell whether it changes."""
        self._python_state.note()

    def check(self) -> None:
        """Warns about state that has changed, and about gradients not yet applied; call it before each save."""
        self._check_gradients()
        self._check_finite()
        self._check_buffers()
        if changed := self._python_state.changed():
            self._warn(
                f"training changes state that checkpoints do not have ({shorten_list(changed)}), so a resumed run "
                "begins with its initial values: pass it to pipe.register_state(), a generator as it is, and anything "
                "else in an object with state_dict() and load_state_dict()"
            )

    def _check_buffers(self) -> None:
        """Warns about buffers that change and are not persistent; one that a call creates counts if it changes then."""
        now = self._copies()
        changed = [
            name for name, old in self._before.items() if name in now and not torch.equal(now[name], old)
        ]
        self._before = {
            name: copy for name, copy in now.items() if name not in changed and name not in self._named
        }
        self._named.update(changed)
        if changed:
            self._warn(
                f"training changes buffers that are not persistent, so checkpoints do not have them "
                f"({shorten_list(changed)}): register them with persistent=True, or a resumed run begins with their "
                "initial values"
            )

    def _copies(self) -> dict[str, Tensor]:
        return {
            name: buffer.detach().clone()
            for name, buffer in self._buffers(persistent=False).items()
            if buffer.numel() <= _MOST_ELEMENTS and buffer.layout is torch.strided
        }

    def _check_finite(self) -> None:
        """Warns about NaN in a buffer, such as the statistics of batch norm; infinity may be part of a mask."""
        if self._nan_named or not self._pipe.world.is_root:  # which saves buffers
            return
        local = {
            name: part
            for name, buffer in self._buffers(persistent=True).items()
            if buffer.is_floating_point() and buffer.element_size() > 1 and buffer.layout is torch.strided
            if (part := buffer.to_local() if isinstance(buffer, DTensor) else buffer).numel()
        }
        largest = torch._foreach_norm(list(local.values()), float("inf")) if local else ()
        bad = [norm.to(self._pipe.device, torch.float32).isnan() for norm in largest]
        flags = torch.stack(bad).tolist() if bad else []
        if found := [name for name, is_bad in zip(local, flags, strict=True) if is_bad]:
            self._nan_named = True
            self._warn(
                f"buffers contain NaN after step {self._run.steps_done:,} and are saved as they are "
                f"({shorten_list(found)}): if they should be finite, check the data and resume from an earlier "
                "checkpoint"
            )

    def _note_update(self, name: str, optimizer: Optimizer, *_: object) -> None:
        self._updates[name] = self._run.steps_done, _gradient(optimizer)

    def _check_gradients(self) -> None:
        """Warns about an optimizer that the last iteration did not step, although its gradients have changed since."""
        stage, done = self._run.current_state, self._run.steps_done
        if self._gradients_named or stage is None or not stage.loop_is_users:
            return
        for name, (at, used) in self._updates.items():
            gradient = _gradient(self._pipe.optimizers[name])
            if at < done - 1 and gradient is not None and gradient != used:
                self._gradients_named = True
                self._warn(
                    f"the checkpoint of step {done:,} is within an accumulation: gradients of optimizer {name!r} wait "
                    "for the next iteration, and a resumed run has lost them; step it in every iteration of "
                    "self.batches(), or use TrainValStage(accumulate=...)"
                )
                return

    def _buffers(self, *, persistent: bool) -> dict[str, Tensor]:
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": buffer
            for name, model in self._pipe.registered_models.items()
            for path, module in model.bare.named_modules()
            for key, buffer in module._buffers.items()
            if (key not in module._non_persistent_buffers_set) is persistent
            if isinstance(buffer, Tensor) and not buffer.is_meta
        }

    def _warn(self, message: str) -> None:
        if self._pipe.world.is_root:
            logger.warning(message)


def _gradient(optimizer: Optimizer) -> object:
    """Returns the identity and version of the first gradient, which differ between a gradient and a later sum."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    found = next((each.grad for each in parameters if each.grad is not None), None)
    return None if found is None else (id(found), found._version)


def own_modules(stage: Stage) -> dict[str, nn.Module]:
    """Returns the modules among the attributes of a stage, alone or in a container, except metrics."""
    found: dict[str, nn.Module] = {}
    for name, value in vars(stage).items():
        match value:
            case dict():
                parts = {f"{name}[{key!r}]": part for key, part in islice(value.items(), _MOST_PARTS)}
            case list() | tuple():
                parts = {f"{name}[{i}]": part for i, part in enumerate(value[:_MOST_PARTS])}
            case _:
                parts = {name: value}
        for part_name, part in parts.items():
            if isinstance(part, nn.Module) and not isinstance(part, EpochMetric):
                found[part_name] = part
    return found


def find_unregistered(stage: Stage) -> str | None:
    """Returns the name of an attribute with trainable parameters that no registered model has."""
    models = stage.pipe.registered_models.values()
    known = {id(p) for model in models for p in model.bare.parameters()}
    for name, module in own_modules(stage).items():
        if any(p.requires_grad and id(p) not in known for p in module.parameters()):
            return name
    return None
