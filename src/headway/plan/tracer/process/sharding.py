"""FSDP2 in one process: in a fake process group, shards and gathered weights have their real sizes."""

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
def fake_process_group(ranks: int) -> Iterator[None]:
    """Provides a process group of `ranks` ranks, of which only rank 0 exists.

    The group creates real tensors: enter it before FakeTensorMode.
    """
    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def infer_unmetered(self: ShardingPropagator, schema: OpSchema) -> object:
        """Infers shapes on full tensors, which never exist on a device, without the meter counting them."""
        with _disable_current_modes():
            return infer(self, schema)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    setattr(ShardingPropagator, infer.__name__, infer_unmetered)
    try:
        yield
    finally:
        setattr(ShardingPropagator, infer.__name__, infer)
        dist.destroy_process_group()


@contextmanager
def fake_sharding(ranks: int, precision: str) -> Iterator[Callable[[nn.Module], None]]:
    """Provides a function that shards a model over `ranks` fake ranks."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "amp" else MixedPrecisionPolicy()
    with fake_process_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))

        def shard(model: nn.Module) -> None:
            """Shards each repeated block as a unit, and the rest of the model as another, as is common."""
            for block in repeated_blocks(model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)

        yield shard
