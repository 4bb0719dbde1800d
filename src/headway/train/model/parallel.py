"""Models over ranks: moved to the device, then modified, then wrapped, then compiled.

`RegisteredModel` keeps both forms of a model: `wrapped` is what training calls, `bare` is what the user registered.
Names in state dicts are always those of `bare`, without `module.` or `_orig_mod.`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, final

import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from headway import dist
from headway.checkpoint import WeightsReport
from headway.dist import World
from headway.errors import UsageError
from headway.system.log import logger
from headway.system.text import shorten_list
from headway.train.model.ema import Ema
from headway.train.model.initial_weights import (
    InitialWeights,
    allocate,
    find_empty,
    is_adapted,
)
from headway.train.model.tensor_group import TensorGroup
from headway.train.model.ties import Ties, check_ties, find_ties, restore_ties

_BROADCAST_BYTES = 250 * 2**20  # of buffers at a time, as in DDP
Blocks: TypeAlias = Sequence[type[nn.Module]]


@final
@dataclass(frozen=True, kw_only=True)
class Ddp:
    """Every rank holds the whole model; gradients are averaged during backward.

    pipe.register_model("net", net, parallel=hw.train.Ddp(static_graph=True))
    """

    static_graph: bool = False
    """the same parameters are used in every step, which allows more overlap"""
    bucket_cap_mb: float | None = None
    """size of the messages that gradients are sent in; None for torch's default"""
    find_unused_parameters: bool = False
    """some parameters get no gradient in some steps"""


@final
@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """Every rank holds a shard of the model (FSDP2); layers are gathered when they are used.

    pipe.register_model("net", net, parallel=hw.train.Fsdp(blocks=(Block,), param_dtype=torch.bfloat16))
    """

    blocks: Blocks = ()
    """classes of the modules that are gathered one at a time, such as (TransformerBlock,); all others form one unit"""
    param_dtype: torch.dtype | None = None
    """the dtype of computation; weights keep theirs"""
    reduce_dtype: torch.dtype | None = None
    """the dtype in which gradients are averaged"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state in host memory"""
    reshard_after_forward: bool = True
    """free gathered layers between forward and backward; False needs more memory and less communication"""
    mesh: DeviceMesh | None = None
    """the ranks to shard over; a 2-D mesh shards along its second dimension and replicates along the first"""


@final
@dataclass(frozen=True, kw_only=True)
class Tp:
    """Every rank holds a part of each layer in the plan (tensor parallelism).

    All ranks of such a group need the same batches, because they compute one result together. The first steps check
    this, and that whole gradients are equal. Tied parameters stay tied if the plan splits both alike.

    >>> Tp(plan={"up": ColwiseParallel(), "down": RowwiseParallel()})
    """

    plan: Mapping[str, ParallelStyle]
    """names of modules and how to split each; `*` matches any name, as in torch's parallelize_module"""
    mesh: DeviceMesh | None = None
    """the ranks to split over; a 2-D mesh splits layers along its second dimension, and FSDP2 shards along the first"""
    partial: Sequence[str] = ()
    """names of modules or parameters that the plan leaves whole and that are applied to this rank's part of a split
    layer, such as `*.q_norm`: each rank computes a part of their gradients, and the parts are added"""


Parallel: TypeAlias = Ddp | Fsdp | Tp | Literal["ddp", "fsdp", "none"]
Compile: TypeAlias = bool | str


@final
class RegisteredModel:
    """A registered model: the module, its wrapper, and the average of its weights if it has one."""

    def __init__(
        self,
        name: str,
        bare: nn.Module,
        wrapped: nn.Module,
        ema: Ema | None,
        *,
        ties: Ties,
        tensor_group: TensorGroup | None,
        averaged: Set[int] | None,
        initial: WeightsReport | None,
    ) -> None:
        self.name, self.bare, self.wrapped, self.ema = name, bare, wrapped, ema
        self.ties, self.tensor_group = ties, tensor_group
        self.initial = initial
        """what `init_from` has matched"""
        self._keeps_mode = False  # whether it is frozen, so that training leaves its mode alone
        self._begun_frozen = set[int]()  # the parameters that were frozen when training began, by id
        self._averaged = averaged  # the parameters whose gradients DDP averages, by id; None without DDP
        named = bare.named_parameters(remove_duplicate=False) if is_adapted(bare) else ()
        self._frozen = {key for key, p in named if not p.requires_grad}  # what checkpoints leave out
        self.evaluated: nn.Module = bare.module if isinstance(bare, DistributedDataParallel) else bare
        """what validation calls: without the wrapper, so that ranks may have different numbers of batches"""

    def begin_training(self, optimizers: Iterable[Optimizer]) -> None:
        """Sets the model to training mode, unless it is frozen, such as a teacher, which keeps its mode."""
        self._check_averaged()
        self._begun_frozen = {id(p) for p in self.bare.parameters() if not p.requires_grad}
        self._keeps_mode = not self._is_trained(optimizers)
        if not self._keeps_mode:
            self.bare.train()

    def train_if_unfrozen(self, optimizers: Iterable[Optimizer]) -> None:
        """Sets the model to training mode if it was frozen when training began and a hook has unfrozen it since.

        Warns about parameters that a hook has unfrozen and that no optimizer steps.
        """
        self._check_averaged()
        self._warn_of_left_out(optimizers)
        if self._keeps_mode and self._is_trained(optimizers):
            self._keeps_mode = False
            if not any(part.training for part in self.bare.modules()):  # else the hook has chosen the modes
                self.bare.train()

    def _is_trained(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether the model has trainable parameters, or an optimizer has its parameters, to train when unfrozen."""
        stepped = _stepped(optimizers)
        return any(p.requires_grad or id(p) in stepped for p in self.bare.parameters())

    def _warn_of_left_out(self, optimizers: Iterable[Optimizer]) -> None:
        named = self.bare.named_parameters()
        thawed = {name: p for name, p in named if p.requires_grad and id(p) in self._begun_frozen}
        stepped = _stepped(optimizers) if thawed else set()
        self._begun_frozen -= {id(p) for p in thawed.values()}  # warns once
        if (left := [name for name, p in thawed.items() if id(p) not in stepped]) and dist.is_root():
            logger.warning(
                f"model {self.name!r}: a hook has unfrozen parameters that no optimizer steps ({shorten_list(left)}): "
                "freeze them after register_optimizer, or add them with add_param_group()"
            )

    def _check_averaged(self) -> None:
        """Raises `UsageError` for a parameter that was frozen at registration: DDP does not average its gradient."""
        if self._averaged is None:
            return
        late = [
            name
            for name, parameter in self.bare.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._averaged
        ]
        if late:
            raise UsageError(
                f"model {self.name!r}: {late[0]} was frozen when the model was registered and is trained now, but DDP "
                "does not average its gradients: freeze it after `register_model(..., "
                "parallel=hw.train.Ddp(find_unused_parameters=True))`"
            )

    @property
    def synced(self) -> bool:
        """Whether gradients are the same on all ranks after backward."""
        return isinstance(self.wrapped, DistributedDataParallel) or self.sharded

    @cached_property
    def sharded(self) -> bool:
        """Whether all ranks must take part in each forward."""
        return any(isinstance(parameter, DTensor) for parameter in self.bare.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the part of the model's state that a checkpoint holds: all of it, or without what adapters freeze."""
        return {key: value for key, value in self.bare.state_dict().items() if key not in self._frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bare.load_state_dict(state, strict=not self._frozen)

    def average_state_dict(self) -> dict[str, Any] | None:
        """Returns the averages of what `state_dict` returns; None if the model has none."""
        if self.ema is None:
            return None
        return {key: value for key, value in self.ema.state_dict().items() if key not in self._frozen}

    def watch(self, optimizer: Optimizer, latest_batch: Callable[[], Any]) -> None:
        """Checks the first steps of an optimizer: that whole gradients are equal in a tensor group, and ties intact."""
        if self.tensor_group is not None:
            self.tensor_group.watch(optimizer, latest_batch)
        if self.sharded and self.ties:
            optimizer.register_step_pre_hook(lambda *_: check_ties(self.name, self.bare, self.ties))

    def set_gradient_sync(self, enabled: bool) -> None:
        """Sets whether the next forward and backward average gradients over ranks, or only add them up on this rank."""
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.require_backward_grad_sync = enabled  # what torch's own no_sync() sets
        elif isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(enabled)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets buffers to rank 0's values and swaps in averaged weights, if any, for a validation."""
        with ExitStack() as stack:
            self._share_buffers(stack)
            if self.ema is not None:
                stack.enter_context(self.ema.averaged_weights())
            yield
            for part in self.bare.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # training must not use layers that were gathered with averaged weights

    def _share_buffers(self, stack: ExitStack) -> None:
        """Sets buffers to rank 0's values, which checkpoints have; on exit, other ranks get their own values back.

        Rank 0 keeps values that a validation step has written into them.
        """
        buffers: list[torch.Tensor] = []
        if isinstance(self.wrapped, DistributedDataParallel):
            buffers = list(self.bare.buffers())
        elif isinstance(self.wrapped, FSDPModule) and self.tensor_group is None:
            saved = self.bare.state_dict()
            buffers = [buffer for name, buffer in self.bare.named_buffers() if name in saved]
        world = c10d.group.WORLD
        if not buffers or world is None or world.size() == 1:
            return
        shared = getattr(self.wrapped, "broadcast_buffers", False)  # by each forward in training, too
        if world.rank() and not shared:
            stack.callback(_restore, buffers, [buffer.clone() for buffer in buffers])
        c10d._broadcast_coalesced(world, buffers, _BROADCAST_BYTES, 0)

    def describe(self) -> str:
        """Describes the model in one line: parameters, trainable parameters, wrapper."""
        total, trainable = count_parameters(self.bare), count_parameters(self.bare, trainable=True)
        some = "" if trainable == total else f" ({trainable:,} trainable)"
        how = {DistributedDataParallel: "ddp", FSDPModule: "fsdp"}
        plain = "split over ranks" if self.sharded else "not wrapped"
        kind = next((word for kind, word in how.items() if isinstance(self.wrapped, kind)), plain)
        average = f", ema {self.ema.decay:g}" if self.ema else ""
        return f"model {self.name}: {total:,} parameters{some}, {kind}{average}"


def _stepped(optimizers: Iterable[Optimizer]) -> set[int]:
    """Returns the ids of the parameters that the optimizers step."""
    return {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}


@torch.no_grad()
def _restore(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Counts the parameters of a module, or its trainable ones; parameters used twice count once.

    >>> count_parameters(nn.Linear(10, 2))
    22
    """
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


def _not_a_module(name: str, given: object) -> UsageError:
    what, remedy = f"of type {type(given).__name__}", "a torch.nn.Module"
    if isinstance(given, type):
        what, remedy = f"the class {given.__name__}", f"an instance, such as {given.__name__}(...)"
    return UsageError(f"model {name!r} is {what}: register {remedy}")


def prepare(
    name: str,
    module: nn.Module,
    world: World,
    *,
    parallel: Parallel,
    sync_batchnorm: bool,
    compile: Compile,
    ema: float | None,
    activation_checkpointing: Blocks,
    initial: InitialWeights | None = None,
) -> RegisteredModel:
    """Moves a model to this rank's device, wraps it, fills it with its initial weights, and compiles it."""
    if not isinstance(module, nn.Module):
        raise _not_a_module(name, module)
    empty = find_empty(name, module, given=initial is not None)
    ties = find_ties(module)
    if not empty:
        module = module.to(world.device)
    elif not isinstance(parallel, Fsdp | Tp) and parallel != "fsdp":
        allocate(module, world.device)
        restore_ties(name, module, ties)
    if sync_batchnorm and world.world_size > 1:
        if world.device.type == "cpu":
            raise UsageError(
                f"model {name!r}: sync_batchnorm works on GPUs only: pass sync_batchnorm=False on the CPU"
            )
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    _checkpoint_activations(name, module, activation_checkpointing)
    wrapped, tensor_group = _wrap(name, module, parallel, world)
    if empty and any(p.is_meta for p in module.parameters()):
        # sharded on the meta device, so that no rank ever allocates the whole model
        allocate(module, world.device)
        restore_ties(name, module, ties)
    check_ties(name, module, ties)
    report = None if initial is None else initial.load(name, module, ties, empty)
    if compile:
        mode = None if compile is True else compile
        wrapped.compile(mode=mode)  # in place, so that the names of parameters stay
    average = None if ema is None else Ema(module, ema)
    replicates = world.world_size > 1 and (parallel == "ddp" or isinstance(parallel, Ddp))
    model = RegisteredModel(
        name,
        module,
        wrapped,
        average,
        ties=ties,
        tensor_group=tensor_group,
        averaged={id(p) for p in module.parameters() if p.requires_grad} if replicates else None,
        initial=report,
    )
    if compile and wrapped is not module:
        model.evaluated = torch.compile(module, mode=mode)  # type: ignore[assignment]
    return model


def _wrap(
    name: str, module: nn.Module, parallel: Parallel, world: World
) -> tuple[nn.Module, TensorGroup | None]:
    match parallel:
        case "none":
            return module, None
        case "ddp":
            return _wrap(name, module, Ddp(), world)
        case "fsdp":
            return _wrap(name, module, Fsdp(), world)
        case Ddp():
            return _replicate(module, parallel, world), None
        case Fsdp():
            return _shard(name, module, parallel, world), None
        case Tp():
            return _parallelize(name, module, parallel, world)
    raise UsageError(
        f'model {name!r}: parallel={parallel!r} is unknown: use "ddp", "fsdp", "none", Ddp(), Fsdp() or Tp()'
    )


def _replicate(module: nn.Module, settings: Ddp, world: World) -> nn.Module:
    if world.world_size == 1 or not any(p.requires_grad for p in module.parameters()):
        return module  # nothing to average
    if isinstance(module, DistributedDataParallel):
        return module  # wrapped by the script, with settings of its own
    replica = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        static_graph=settings.static_graph,
        bucket_cap_mb=settings.bucket_cap_mb,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    if world.world_size > 2 and not (settings.static_graph or settings.find_unused_parameters):
        _choose_buckets(replica)
    return replica


def _choose_buckets(replica: DistributedDataParallel) -> None:
    """Makes DDP build its final buckets now, by a first step in which all gradients are zero.

    Otherwise it rebuilds them after the first real step. Three numbers summed in another order differ in the last bit,
    so the first step after a resume would differ from the same step of a run that was never stopped.
    """
    module = replica.module
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()):
        return  # sparse gradients have no zeros to send
    replica.module = _ZeroSum([p for p in module.parameters() if p.requires_grad])
    replica.require_forward_param_sync = False  # it would broadcast the buffers of a module that has none
    try:
        replica().backward()
    finally:
        replica.module, replica.require_forward_param_sync = module, True
    module.zero_grad(set_to_none=True)


@final
class _ZeroSum(nn.Module):
    """A sum over all parameters that is always zero."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_used = parameters

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device=self._parameters_used[0].device)
        for parameter in self._parameters_used:  # backward begins with the last, as in a model
            total = total + (parameter * 0).sum().real
        return total


def _shard(name: str, module: nn.Module, settings: Fsdp, world: World) -> nn.Module:
    whole_world = init_device_mesh(world.device.type, (world.world_size,))
    shard: Callable[[nn.Module], object] = partial(
        fully_shard,
        mesh=settings.mesh or whole_world,
        reshard_after_forward=settings.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=settings.param_dtype, reduce_dtype=settings.reduce_dtype),
        offload_policy=CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    )
    for block in _find_blocks(name, module, settings.blocks, "Fsdp(blocks=...)"):
        shard(block)
    shard(module)
    return module


def _parallelize(name: str, module: nn.Module, settings: Tp, world: World) -> tuple[nn.Module, TensorGroup]:
    mesh = settings.mesh or init_device_mesh(world.device.type, (world.world_size,))
    names = [part for part, _ in module.named_modules() if part]
    for pattern in settings.plan:
        if not any(fnmatchcase(part, pattern) for part in names):
            raise UsageError(
                f"model {name!r}: the plan splits {pattern!r}, which is not a module of the model: its modules are "
                f"{', '.join(names[:20])}"
            )
    inner = mesh if mesh.ndim == 1 else mesh[_dimension(name, mesh, 1)]
    ties = find_ties(module)
    module = parallelize_module(module, inner, dict(settings.plan))
    restore_ties(name, module, ties)
    group = TensorGroup(name, module, inner, settings.partial)
    if mesh.ndim > 1:
        fully_shard(module, mesh=mesh[_dimension(name, mesh, 0)])
    return module, group


def _dimension(name: str, mesh: DeviceMesh, number: int) -> str:
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise UsageError(
            f"model {name!r}: Tp(mesh=...) takes one dimension, or two with names: "
            'init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))'
        )
    return mesh.mesh_dim_names[number]


def _checkpoint_activations(name: str, module: nn.Module, blocks: Blocks) -> None:
    """Makes the blocks recompute their activations in backward instead of storing them."""
    for block in _find_blocks(name, module, blocks, "activation_checkpointing"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _find_blocks(name: str, module: nn.Module, blocks: Blocks, setting: str) -> list[nn.Module]:
    found = [part for part in module.modules() if isinstance(part, tuple(blocks))]
    if blocks and not found:
        wanted = ", ".join(block.__name__ for block in blocks)
        known = ", ".join(sorted({type(part).__name__ for part in module.modules()}))
        raise UsageError(f"model {name!r}: {setting} names {wanted}, but the model consists of {known}")
    return found
