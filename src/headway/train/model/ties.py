"""Tied parameters: one parameter under several names, such as the weight of an embedding and of the output layer.

Splitting or sharding replaces each parameter by a new one, name by name, which silently breaks ties: the optimizer then
has one more parameter, and each of them gets a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import UsageError

Ties: TypeAlias = Sequence[Sequence[str]]
"""the names of each parameter that has more than one"""


def find_ties(module: nn.Module) -> Ties:
    """Returns the names of each parameter that has more than one.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> net[1].weight = net[0].weight
    >>> find_ties(net)
    [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def restore_ties(model: str, module: nn.Module, ties: Ties) -> None:
    """Ties parameters again after a plan has split each of them; raises `UsageError` if it splits them differently."""
    for names in ties:
        first, *others = names
        kept = module.get_parameter(first)
        for name in others:
            if _layout(module.get_parameter(name)) != _layout(kept):
                raise UsageError(
                    f"model {model!r}: {first!r} and {name!r} are one parameter, but the plan splits them in different "
                    "ways: split both by rows, such as an embedding with RowwiseParallel and a linear layer with "
                    "ColwiseParallel, or leave both whole"
                )
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, kept)


def check_ties(model: str, module: nn.Module, ties: Ties) -> None:
    """Raises `UsageError` if parameters that were tied no longer are."""
    for names in ties:
        if len({id(module.get_parameter(name)) for name in names}) > 1:
            raise UsageError(
                f"model {model!r}: {' and '.join(repr(name) for name in names)} were one parameter, which sharding "
                "has separated: keep all of them in one unit, by leaving the classes of their modules out of "
                "Fsdp(blocks=...)"
            )


def _layout(parameter: nn.Parameter) -> object:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
