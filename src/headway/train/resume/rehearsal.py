"""Proves that what a checkpoint will have can be restored, once, when it first exists: not when the run has died.

Every object is given its own state, as a checkpoint would return it, and must return the same again. Of a model, only
the types of its tensors are checked: torch loads it, and what is restored is compared when a run resumes.

All of it is in memory, so no save needs to follow the first step: the bits on disk are compared by the first save that
has them (`checkpoint.write.read_back`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.checkpoint.format import dtypes, tree
from headway.checkpoint.format.tensor_file import bytes_of
from headway.checkpoint.write import comparison
from headway.dist.collective.exchange import RankExchange
from headway.errors import UsageError
from headway.train.metrics.epoch_metrics import load_metric_state, metric_state
from headway.train.resume import optimizers, state
from headway.train.resume.rng import temporary_state

if TYPE_CHECKING:
    from headway.train.run_state import RunState

_MAX_BYTES = 1 << 30
"""tensors of an object of the user that are copied to try it; with more, it is only encoded"""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """An object whose state is saved."""

    kind: str
    name: str
    save: Callable[[], Any]
    load: Callable[[Any], object] | None
    copies: bool = True
    """whether it gets copies of its tensors, as it may write into its own"""


@final
class Rehearsal:
    """Tries the states of a run before the first step, and those of optimizers as soon as they have any."""

    def __init__(self, run: RunState) -> None:
        self._run, self._pipe = run, run.pipe
        self._unproven = set[str]()  # optimizers that have had no state since the first step

    def begin(self) -> None:
        """Proves all that exists before training; raises `UsageError` on all ranks if any cannot."""
        self._agree("prove the first state", lambda: self._prove([*self._optimizers(), *self._objects()]))

    def after_step(self) -> None:
        """Proves optimizers after the first step of this process, in which most create their state."""
        self._unproven = set(self._pipe.optimizers)
        self.before_save()

    def before_save(self) -> None:
        """Proves the optimizers that have created their state since the first step, and that ranks have the same."""
        if self._unproven:
            found = self._agree("prove the state of optimizers", self._prove_optimizers)
            self._unproven -= {name for digests in found for name in digests}
            self._check_equal(found)

    def _agree(self, task: str, prove: Callable[[], dict[str, int]]) -> list[dict[str, int]]:
        """Returns what each rank has found; raises the first problem of any rank on all."""

        def attempt() -> tuple[str | None, dict[str, int]]:
            try:
                with temporary_state(None, self._pipe.device):
                    return None, prove()
            except UsageError as error:
                return str(error), {}

        found = RankExchange(task).all_gather(attempt)
        if problems := [problem for problem, _ in found if problem is not None]:
            raise UsageError(problems[0])
        return [digests for _, digests in found]

    def _prove_optimizers(self) -> dict[str, int]:
        """Returns a digest of each optimizer that has state."""
        ready = [name for name in sorted(self._unproven) if self._pipe.optimizers[name].state]
        self._prove([part for part in self._optimizers() if part.name in ready])
        if self._pipe.world.world_size == 1:
            return dict.fromkeys(ready, 0)
        return {name: zlib.crc32(json.dumps(self._fingerprints(name)).encode()) for name in ready}

    def _check_equal(self, digests: list[dict[str, int]]) -> None:
        """Raises `UsageError` on all ranks if an optimizer differs between ranks: a checkpoint has that of rank 0."""
        unequal = [
            name
            for name in sorted(self._pipe.optimizers)
            if len({of_rank[name] for of_rank in digests if name in of_rank}) > 1
        ]
        for name in unequal[:1]:
            with temporary_state(None, self._pipe.device):
                first, *others = RankExchange("compare optimizers").all_gather(
                    partial(self._fingerprints, name)
                )
            rank, path = next(
                (rank, path)
                for rank, other in enumerate(others, 1)
                for path in {**first, **other}
                if first.get(path) != other.get(path)
            )
            raise UsageError(
                f"optimizer {name!r} has another {path!r} on rank {rank} than on rank 0, and a checkpoint holds only "
                "that of rank 0: compute it from what all ranks have, or keep it in an object of its own, with "
                "pipe.register_rank_state()"
            )

    def _fingerprints(self, name: str) -> dict[str, int]:
        packed = optimizers.pack(name, self._pipe.optimizers[name], state.parameter_names(self._pipe))
        return optimizers.fingerprints(packed, state.synced_parameters(self._pipe))

    def _prove(self, parts: list[_Part]) -> dict[str, int]:
        for part in parts:
            _try(part)
        return {}

    def _optimizers(self) -> Iterator[_Part]:
        names = state.parameter_names(self._pipe)
        for name, optimizer in self._pipe.optimizers.items():
            yield _Part(
                kind="optimizer",
                name=name,
                save=partial(optimizers.pack, name, optimizer, names),
                load=partial(optimizers.load, optimizer, names),
                copies=False,
            )

    def _objects(self) -> Iterator[_Part]:
        for name, model in self._pipe.registered_models.items():
            yield _Part(kind="model", name=name, save=model.state_dict, load=None, copies=False)
        for name, scheduler in self._pipe.schedulers.items():
            yield _Part(
                kind="scheduler", name=name, save=scheduler.state_dict, load=scheduler.load_state_dict
            )
        for name, thing in self._run.registered_state.items():
            save, load = partial(metric_state, thing), partial(load_metric_state, thing)
            yield _Part(kind="state", name=name, save=save, load=load)
        for name, thing in self._run.rank_states.items():
            yield _Part(kind="state", name=name, save=thing.state_dict, load=thing.load_state_dict)


def _try(part: _Part) -> None:
    """Gives an object its own state; raises `UsageError` if it cannot be saved, or if it does not return the same."""
    saved = part.save()
    packed, tensors = tree.split({part.kind: {part.name: saved}})
    for key, tensor in tensors.items():
        dtypes.check(key, tensor)
    copies = part.copies and sum(each.nbytes for each in tensors.values()) <= _MAX_BYTES
    if part.load is None or copies < part.copies:
        return
    read = tree.join(
        json.loads(json.dumps(packed)), {key: _read(each, copies) for key, each in tensors.items()}
    )
    given, described = read[part.kind][part.name], comparison.describe(saved)
    path = comparison.find_difference(described, comparison.describe(given))
    if path is not None:
        raise _refuse(part, f"a checkpoint changes {path!r}")
    with state.loading(part.kind, part.name):
        part.load(given)
    path = comparison.find_difference(described, comparison.describe(part.save()))
    if path is not None:
        raise _refuse(part, f"{path!r} differs after load_state_dict() of its own state_dict()")


def _refuse(part: _Part, why: str) -> UsageError:
    return UsageError(
        f"{part.kind} {part.name!r} could not be resumed, since {why}: let load_state_dict() restore all that "
        "state_dict() returns"
    )


def _read(tensor: Tensor, copies: bool) -> Tensor:
    """Returns a tensor as a checkpoint would return it; one that is stored as it is, is not copied unless told."""
    if isinstance(tensor, DTensor):
        return tensor
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous() or tensor.is_complex():
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = bytearray(bytes_of(whole)) if whole.numel() else bytearray()
        read = torch.frombuffer(data, dtype=whole.dtype) if data else whole
        return read.view(whole.shape).to(tensor.device)
    return tensor.detach().clone() if copies else tensor
