"""FSDP2 without other ranks: a process group that pretends, so that shards and gathers have their real sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from headway.plan.tracer.process.blocks import repeated_blocks


@contextmanager
def group(ranks: int) -> Iterator[None]:
    """A group of ranks of which only this one exists.

    It is made of real tensors: enter it before the mode that fakes them.
    """
    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def infer_unseen(self: ShardingPropagator, schema: OpSchema) -> object:
        """Sharded tensors infer shapes on whole ones; those never exist on a device and must not be counted."""
        with _disable_current_modes():
            return infer(self, schema)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    setattr(ShardingPropagator, infer.__name__, infer_unseen)
    try:
        yield
    finally:
        setattr(ShardingPropagator, infer.__name__, infer)
        dist.destroy_process_group()


@contextmanager
def pretended(ranks: int, precision: str) -> Iterator[Callable[[nn.Module], None]]:
    """What shards a model over ranks that only seem to be there."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "amp" else MixedPrecisionPolicy()
    with group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))

        def shard(model: nn.Module) -> None:
            """Each repeated block is a unit of its own, the rest another, as people do."""
            for block in repeated_blocks(model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)

        yield shard
