"""Peak memory of torch's own sharded code: torchtitan's 70B and a stage of its 405B, traced without a GPU (minutes).

    python benchmarks/sharded.py [70b | 405b]

FSDP2 and DTensor tensor parallelism over fake ranks, every layer recomputed, the loss over a split vocabulary.
tests/plan/test_memory.py compares the closed forms with the bytes printed here.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from headway.plan.tracer.process import allocator, cuda_emulation
from headway.plan.tracer.process.memory_meter import MemoryMeter
from headway.plan.tracer.process.sharding import fake_process_group

TP, HEAD, KEYS, VOCAB, TOKENS = 8, 128, 8, 128256, 8192


class Case(NamedTuple):
    width: int
    ffn: int
    layers: int
    fsdp: int
    microbatch: int
    microbatches: int
    """Above one: the first stage of a pipeline, which runs all forwards before its first backward."""


CASES = {"70b": Case(8192, 28672, 80, 32, 16, 1), "405b": Case(16384, 53248, 15, 8, 4, 8)}


def linear(inp: int, out: int) -> nn.Linear:
    return nn.Linear(inp, out, bias=False)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles[None, :, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wo = linear(width, width), linear(width, width)
        self.wk, self.wv = linear(width, KEYS * HEAD), linear(width, KEYS * HEAD)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (product(x).view(b, t, -1, HEAD) for product in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = linear(width, ffn), linear(ffn, width), linear(width, ffn)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(case.width), FeedForward(case.width, case.ffn)
        self.attention_norm, self.ffn_norm = Norm(case.width), Norm(case.width)

    def work(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.work, x, angles, use_reentrant=False, preserve_rng_state=False)


class Llama(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, case.width)
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.last = case.microbatches == 1
        if self.last:
            self.norm, self.output = Norm(case.width), linear(case.width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.zeros(tokens.shape[1], HEAD // 2, dtype=torch.complex64)
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x)) if self.last else x


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """As torchtitan did in December 2024."""
    columns, rows = ColwiseParallel, lambda: RowwiseParallel(output_layouts=Shard(1))
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    with_angles = {key: (*value, None) for key, value in whole.items()}
    ends = {"embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    if model.last:
        ends |= {"norm": SequenceParallel(), "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)}  # fmt: skip
    parallelize_module(model, mesh["tp"], ends)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        parallelize_module(layer, mesh["tp"], {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**with_angles), "feed_forward": PrepareModuleInput(**whole),
            "attention.wq": columns(), "attention.wk": columns(), "attention.wv": columns(), "attention.wo": rows(),
            "feed_forward.w1": columns(), "feed_forward.w3": columns(), "feed_forward.w2": rows(),
        })  # fmt: skip
        again = model.last and number < len(model.layers) - 1
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=model.last)


def whole_model(model: Llama, tokens: Tensor) -> None:
    with loss_parallel():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        del logits
        loss.backward()


def first_stage(model: Llama, tokens: Tensor, grads: list[Tensor]) -> None:
    """Whole gradients add up until the last backward scatters them."""
    sync: list[Callable[[bool], None]] = [
        model.set_requires_gradient_sync, model.set_is_last_backward, model.set_reshard_after_backward,
    ]  # fmt: skip
    for each in sync:
        each(False)
    outputs = [model(tokens) for _ in grads]
    for number, grad in enumerate(grads):
        if number == len(grads) - 1:
            for each in sync:
                each(True)
        torch.autograd.backward(outputs.pop(0), grad)


def trace_peak(case: Case) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak of the second step."""
    meter = MemoryMeter()
    with fake_process_group(case.fsdp * TP):
        mesh = init_device_mesh("cpu", (case.fsdp, TP), mesh_dim_names=("dp", "tp"))
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            model = Llama(case)
            shard(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
            tokens = torch.zeros(case.microbatch, TOKENS, dtype=torch.long)
            shape = (case.microbatch, TOKENS // TP, case.width)
            grads = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(case.microbatches)]
            built = len(meter.events)
            for _ in range(2):
                start = len(meter.events)
                optimizer.zero_grad()
                with meter.during("forward"):
                    if model.last:
                        whole_model(model, tokens)
                    else:
                        first_stage(model, tokens, grads)
                with meter.during("optimizer"):
                    optimizer.step()
    return allocator.replay(list(meter.events), built=built, start=start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all if not given")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {unknown.pop()!r}; valid: {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    kept = cuda_emulation.install()
    for name in options.cases or CASES:
        allocated, reserved = trace_peak(CASES[name])
        print(f"{name}: {allocated / 2**30:.1f} GiB allocated, {reserved / 2**30:.1f} reserved", flush=True)
    del kept


if __name__ == "__main__":
    main()
