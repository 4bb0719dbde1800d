"""Initial weights: models are filled from files after they are wrapped; parameters may have no memory until then."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from headway.checkpoint import Weights, WeightsReport
from headway.checkpoint.inspect.exporter import adapter_infix
from headway.checkpoint.weights.loading import Rename, load_weights
from headway.dist.collective.guard import from_root
from headway.dist.objects import report_root
from headway.errors import UsageError
from headway.run import Run, find_runs

WeightsLike: TypeAlias = Weights | Run | str | os.PathLike[str]

_IN_PEFT = re.compile(r"\.(base_layer|original_module)\.")
"""what peft adds to the names of the base model"""
_COPY = re.compile(r"\.modules_to_save\.[^.]+\.")


@final
@dataclass(frozen=True)
class InitialWeights:
    """The `init_from`, `strict` and `rename` of `register_model`."""

    source: Weights
    strict: bool = True
    rename: Rename | None = None

    def __post_init__(self) -> None:
        rename: object = self.rename
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise UsageError(
                f"rename={rename!r:.80}: give a dict from old prefixes of names to new ones, such as "
                "{'old.': 'new.'}, or a function"
            )

    @classmethod
    def of(
        cls, source: WeightsLike | None, *, strict: bool, rename: Rename | None, root: str | os.PathLike[str]
    ) -> InitialWeights | None:
        """Checks the arguments of `register_model`; None without `init_from`, which may be the end of a run's id."""
        if source is not None:
            return cls(find_weights(source, root), strict=strict, rename=rename)
        for name, value, default in (("strict", strict, True), ("rename", rename, None)):
            if value != default:
                raise UsageError(
                    f"{name}={value!r:.80} does nothing without init_from: pass the source of the weights, such as "
                    'init_from="runs/digits-..."'
                )
        return None

    def load(
        self, name: str, module: nn.Module, ties: Sequence[Sequence[str]], empty: Collection[str] = ()
    ) -> WeightsReport:
        """Fills a model, whole or sharded, and prints what matched; each rank reads only its shards.

        `empty` names the tensors whose memory is not initialized, which must be in the weights.
        """
        tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
        report = load_weights(
            self.source,
            tensors,
            model=name,
            strict=self.strict,
            rename=_with_adapters(self.rename, module, tensors) if is_adapted(module) else self.rename,
            ties=ties,
            optional=_trained_and_frozen(module) if is_adapted(module) else (),
            required=empty,
        )
        if is_adapted(module):
            report = _fill_copies(tensors, report)
        module.load_state_dict(tensors, strict=False)
        report_root(f"model {name}: {report}")
        return report


def find_weights(given: WeightsLike, root: str | os.PathLike[str]) -> Weights:
    """Returns the weights; a text that is not a path may be the id of a run under `root`, or its end."""
    weights = given if isinstance(given, Weights) else Weights(given)
    place = weights.source
    if isinstance(place, str) and place and "/" not in place:
        found = from_root(lambda: _path_of_run(place, root))
        return weights if found is None else replace(weights, source=found)
    return weights


def _path_of_run(place: str, root: str | os.PathLike[str]) -> str | None:
    found = [] if Path(place).exists() else find_runs(place, root)
    return str(found[0].path) if len(found) == 1 else None


def is_adapted(module: nn.Module) -> bool:
    """Whether a model has adapters of peft, such as LoRA: checkpoints then leave out frozen parameters."""
    return hasattr(module, "peft_config") and hasattr(module, "base_model")


def adapter_name(module: nn.Module) -> str:
    """Returns the name of the adapter that is trained, which is part of the names of its tensors in peft."""
    known: Any = module.peft_config
    active = getattr(module, "active_adapter", "default")
    return str(active if isinstance(active, str) and active in known else next(iter(known)))


def adapter_config(module: nn.Module) -> dict[str, Any] | None:
    """Returns the settings of a model's adapter as plain values, for its export; None if it has none."""
    if not is_adapted(module):
        return None
    config: Any = module.peft_config[adapter_name(module)]  # type: ignore[index]
    plain = json.dumps(
        config.to_dict(), default=lambda each: sorted(each) if isinstance(each, set) else str(each)
    )
    found: dict[str, Any] = json.loads(plain)
    return found


def _trained_and_frozen(module: nn.Module) -> list[set[str]]:
    """Returns both sets of names: weights may have only the base model, or only the adapters."""
    named = dict(module.named_parameters(remove_duplicate=False))
    trained = {key for key, parameter in named.items() if parameter.requires_grad}
    return [trained, {*named, *dict(module.named_buffers(remove_duplicate=False))} - trained]


def _with_adapters(rename: Rename | None, module: nn.Module, tensors: dict[str, Any]) -> Rename:
    """Returns a rename that also finds tensors by their names in the base model, and by those in files of peft."""
    longer = {_IN_PEFT.sub(".", name.removeprefix("base_model.model.")): name for name in tensors}
    infix = adapter_infix(adapter_name(module))
    longer |= {short: name for name in tensors if (short := infix.sub("", name)) != name}

    def find(name: str) -> str | None:
        if callable(rename):
            name = rename(name)  # type: ignore[assignment]
        elif rename is not None:
            before = next((start for start in rename if name.startswith(start)), "")
            name = rename.get(before, "") + name.removeprefix(before)
        return longer.get(name, name)

    return find


def _fill_copies(tensors: Mapping[str, Tensor], report: WeightsReport) -> WeightsReport:
    """Fills the modules that peft trains as a whole, such as a head, with the weights of the base that they copy."""
    matched = set(report.matched)
    bases = {name: _COPY.sub(".original_module.", name) for name in report.missing}
    copies = {name: base for name, base in bases.items() if base in matched}
    for name, base in copies.items():
        tensors[name].copy_(tensors[base])
    return replace(
        report,
        matched=(*report.matched, *copies),
        missing=tuple(name for name in report.missing if name not in copies),
    )


def find_empty(name: str, module: nn.Module, *, given: bool) -> set[str]:
    """Returns the names of tensors on the meta device; raises `UsageError` if the weights could not fill them."""
    kept = module.state_dict()
    lost = [key for key, buffer in module.named_buffers() if buffer.is_meta and key not in kept]
    if lost:
        raise UsageError(
            f"model {name!r} has a buffer on the meta device that no checkpoint holds, {lost[0]!r}: build the model "
            'in "with hw.train.empty_parameters():", which keeps buffers, instead of torch.device("meta")'
        )
    empty = {key for key, tensor in kept.items() if isinstance(tensor, Tensor) and tensor.is_meta}
    if empty and not given:
        raise UsageError(
            f"model {name!r} has parameters on the meta device, without values: pass init_from= to fill them"
        )
    return empty


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocates tensors that are on the meta device, and moves the others to the device."""

    def move(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(move)  # type: ignore[no-untyped-call]


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Builds models without memory for their parameters, to be filled by `register_model(..., init_from=...)`.

    With FSDP2, no rank ever holds the whole model. Buffers are created as usual.

    >>> with hw.train.empty_parameters():
    ...     net = LlamaForCausalLM(config)
    >>> pipe.register_model("net", net, parallel="fsdp", init_from="llama-3-8b")
    """
    usual = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        usual(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = usual  # type: ignore[method-assign]
