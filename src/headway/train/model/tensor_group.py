"""`TensorGroup`: the ranks that compute one model together, and the gradients of what each of them holds whole.

A parameter that the plan does not split is whole on every rank of the group. Where it is applied to whole activations,
its gradient is whole, too. Where it is applied to the rank's own part of a split layer (a norm over the heads of this
rank, as in Qwen3), each rank computes a part of the gradient, and the parts must be added. Torch does not distinguish
the two cases, so parameters of the second kind are named in `Tp(partial=...)`, and the gradients of the first steps are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, final

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.errors import UsageError
from headway.train.batches import first_tensor

CHECKED_STEPS = frozenset(2**power for power in range(11))
"""not only the first: where a layer starts with zeros, the first gradients of the layers before it are zeros on all
ranks"""
TOLERANCE = 0.02
"""fraction of a gradient's norm; bf16 without deterministic kernels differs by less, a part of a gradient by more"""


@final
class TensorGroup:
    """The ranks among which a plan splits the layers of a model."""

    def __init__(self, model: str, module: nn.Module, mesh: DeviceMesh, partial_names: Sequence[str]) -> None:
        self.model, self._module, self._mesh = model, module, mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self.first_rank = c10d.get_global_rank(self._group, 0)
        self._summed = self._find_partial(partial_names)
        self._hooked: dict[int, Tensor] = {}
        self._whole_already: set[str] = set()
        self._compares_parts = True
        for name in self._summed if self.size > 1 else ():
            owner, _, attribute = name.rpartition(".")
            hook = partial(self._sum_gradient_of, name, attribute)
            module.get_submodule(owner).register_forward_pre_hook(hook)

    def _find_partial(self, patterns: Sequence[str]) -> list[str]:
        """Returns the names of the parameters whose gradients are added up: patterns name parameters or modules."""
        if isinstance(patterns, str):
            raise UsageError(f"model {self.model!r}: Tp(partial={patterns!r}): give a tuple of names")
        whole = [name for name, p in self._module.named_parameters() if not self._splits(p)]
        found: list[str] = []
        for pattern in patterns:
            matches = [
                name for name in whole if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
            ]
            if not matches:
                raise UsageError(
                    f"model {self.model!r}: Tp(partial=...) names {pattern!r}, which is not a parameter that the plan "
                    f"leaves whole: these are {', '.join(whole[:20]) or 'none'}"
                )
            found += matches
        return list(dict.fromkeys(found))

    def _splits(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is on the mesh of this group, as those that the plan names are."""
        if not isinstance(parameter, DTensor):
            return False
        mesh, own = parameter.device_mesh, self._mesh.mesh_dim_names
        return mesh == self._mesh or bool(own and own[0] in (mesh.mesh_dim_names or ()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sum_gradient_of(self, name: str, attribute: str, owner: nn.Module, _: object) -> None:
        """Hooks the tensor that the module is about to use; with FSDP2 it is not the parameter in the optimizer."""
        tensor = owner.get_parameter(attribute)
        if id(tensor) not in self._hooked and tensor.requires_grad:
            self._hooked[id(tensor)] = tensor
            tensor.register_hook(partial(self._sum_parts, name))  # type: ignore[no-untyped-call]

    def _sum_parts(self, name: str, gradient: Tensor) -> Tensor:
        """Adds up the gradient of one backward pass over the group, before it is accumulated."""
        total = gradient.clone()
        c10d.all_reduce(total, group=self._group)
        if self._compares_parts and total.any() and _difference(gradient, total, self.size) <= TOLERANCE:
            self._whole_already.add(name)
        return total

    # --- checks of the first steps

    def watch(self, optimizer: Optimizer, latest_batch: Callable[[], Any]) -> None:
        """Compares batches and whole gradients over the group, before some of the first steps of an optimizer."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in self._module.named_parameters() if id(p) in mine]
        if not named or self.size == 1:
            return
        steps = 0

        def check(*_: object) -> None:
            nonlocal steps
            steps += 1
            self._compares_parts = steps + 1 in CHECKED_STEPS
            if steps in CHECKED_STEPS:
                self._check_batch(first_tensor(latest_batch()))
                self._check_gradients(named)

        optimizer.register_step_pre_hook(check)

    def _check_batch(self, batch: Tensor | None) -> None:
        """Raises `UsageError` unless all ranks of the group have the same batch."""
        flat = torch.zeros(1) if batch is None else batch.detach().reshape(-1)
        flat = (flat.abs() if flat.is_complex() else flat).double()
        weights = torch.arange(len(flat), device=flat.device) % 1021 + 1
        numbers = [float(len(flat)), flat.sum().item(), (flat * weights).sum().item()]
        mine = torch.tensor(numbers, device=self._module_device()).nan_to_num()
        low, high = mine.clone(), mine.clone()
        c10d.all_reduce(low, op=c10d.ReduceOp.MIN, group=self._group)
        c10d.all_reduce(high, op=c10d.ReduceOp.MAX, group=self._group)
        if not torch.equal(low, high):
            raise UsageError(
                f"model {self.model!r} is split over {self.size} ranks, which got different batches: give the same "
                "ones to all ranks of a tensor group, as with hw.data.DataLoader(..., rank=0, world_size=1)"
            )

    def _check_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raises `UsageError` if a whole gradient differs over the group, or was whole before its parts were added."""
        whole = [(name, local) for name, p in named if (local := self._whole_gradient(p)) is not None]
        errors = []
        for _, local in whole:
            total = local.clone()
            c10d.all_reduce(total, group=self._group)
            errors.append(_difference(local, total, self.size))
        errors += [float(name not in self._whole_already) for name in self._summed]
        self._whole_already.clear()
        found = torch.tensor(errors, device=self._module_device())
        if not len(found):
            return
        c10d.all_reduce(found, op=c10d.ReduceOp.MAX, group=self._group)
        for (name, _), error in zip(whole, found.tolist(), strict=False):
            if not error <= TOLERANCE:
                raise UsageError(
                    f"model {self.model!r}: the gradient of {name!r}, which every rank holds whole, differs over the "
                    f"ranks of its tensor group by {error:.0%}: if it is applied to the rank's own part of a split "
                    f"layer, pass Tp(partial=({name!r},)), else draw the same random numbers on these ranks"
                )
        for name, partial_somewhere in zip(self._summed, found.tolist()[len(whole) :], strict=True):
            if not partial_somewhere:
                raise UsageError(
                    f"model {self.model!r}: Tp(partial=...) names {name!r}, whose gradient is whole on every rank "
                    "already: leave it out, or its gradient is counted once per rank"
                )

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the gradient on this rank if it must be the same on all ranks of the group."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not isinstance(gradient, DTensor):
            return gradient.detach()
        if self._splits(parameter) and not gradient.placements[-1].is_replicate():
            return None
        return gradient.to_local().detach()

    def _module_device(self) -> torch.device:
        return next(self._module.parameters()).device


def _difference(gradient: Tensor, total: Tensor, size: int) -> float:
    """Returns how far a rank's gradient is from the mean over the group, as a fraction of the mean.

    0 if all are zero, and for non-finite gradients, which the loop reports by other means.
    """
    mean = total.double() / size
    norm, off = mean.norm().item(), (gradient.double() - mean).norm().item()
    if not math.isfinite(off):
        return 0.0
    return off / norm if norm else math.inf if off else 0.0
