"""Logs every storage that a step allocates and frees, in the sizes that the CUDA allocator counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from headway.plan.tracer.kernels import Kernel

_BLOCK_BYTES = 512
"""CUDA's caching allocator rounds requests up to a multiple of this."""
_WORKSPACE_BYTES = 32 << 20
"""cuBLAS's workspace on Hopper; 8 MiB on older devices."""
_DEVICE = torch.ops.prim.device.default
_RANDOM = torch.ops.aten.rand.default
_BLAS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"})


class StorageEvent(NamedTuple):
    """A storage is allocated (positive size) or freed (negative)."""

    serial: int
    size: int


class StorageOrigin(NamedTuple):
    """The phase and the module that allocated a storage."""

    phase: str
    module: str


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs storages and counts FLOPs while it is active.

    Each storage has a serial number. Labels such as "gradients" are added later, when the use of a storage is known;
    `replay_peak` then finds what was alive at the peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[StorageEvent] = []
        self.origins: dict[int, StorageOrigin] = {}
        self.labels: dict[int, str] = {}
        self.queue: list[tuple[str, Kernel]] = []  # phase and kernel, in launch order
        self.phase = "build"
        self.module = ""
        self._workspaces: set[str] = set()  # phases that have a workspace
        self._restore: Callable[[], None] = lambda: None
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, FakeTensor, nn.Parameter) for kind in types):
            return NotImplemented  # a sharded tensor: its local shards are dispatched here one by one
        if func is _DEVICE:
            return func(*args)  # two of three calls only read the device of a tensor
        if func is _RANDOM and not args[0]:
            with unset_fake_temporarily():
                # a model that draws a single number branches on it, as LayerDrop does
                return torch.tensor(0.5)
        small = _SMALL_ELEMENTS if self.phase == "build" else 1
        if _is_small_table(func, args, kwargs or {}, small):
            # models read such values (drop rates, widths, tables) while they are built
            with unset_fake_temporarily():
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        made = len(self.origins)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.log(leaf)
        if len(self.origins) > made or func._schema.is_mutable:  # a view launches no kernel
            self._count(func, args, kwargs or {}, out)
        return out

    def __enter__(self) -> MemoryMeter:
        """Also logs storages that are resized in place, as FSDP does to free gathered weights."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            self._log(storage)
            return out

        self._restore = lambda: setattr(torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._restore()

    def log(self, tensor: torch.Tensor) -> int:
        """Returns the serial number of a tensor's storage, and logs the storage if it is new."""
        return self._log(_local(tensor).untyped_storage())

    def _log(self, storage: Any) -> int:
        key = id(storage)
        known = self._alive.get(key)
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if known is not None and known[2]() is storage:
            serial, old, ref = known
            if old != size:
                self.events.append(StorageEvent(serial, size - old))
                self._alive[key] = (serial, size, ref)
            return serial
        serial = len(self.origins)
        self.origins[serial] = StorageOrigin(self.phase, self.module)
        self._alive[key] = (serial, size, weakref.ref(storage, self._on_free(key, serial)))
        self.events.append(StorageEvent(serial, size))
        return serial

    def _on_free(self, key: int, serial: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            known = self._alive.get(key)
            if known is not None and known[0] == serial:
                del self._alive[key]
                self.events.append(StorageEvent(serial, -known[1]))

        return free

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Labels a tensor's storage."""
        self.labels[self.log(tensor)] = name

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Appends a kernel with its FLOPs and the bytes it reads and writes."""
        name = func._overloadpacket.__name__
        formula = _FORMULAS.get(func) or flop_registry.get(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
        touched = sum(_bytes(leaf) for leaf in tree_leaves((args, kwargs, out)))
        if func in _CAUSAL and len(args) > _CAUSAL[func] and args[_CAUSAL[func]]:
            name = f"{name} (causal)"  # CUDA's kernels skip the masked half; FLOPs count it
        precision = _precision(name, args) if flops else "bf16"
        self.queue.append((self.phase, Kernel(name, flops, touched, precision)))
        if name in _BLAS:
            self._add_workspace()

    def _add_workspace(self) -> None:
        """Adds the workspace that cuBLAS keeps per thread: one for the caller, one for the backward pass."""
        if self.phase in ("forward", "backward") and self.phase not in self._workspaces:
            self._workspaces.add(self.phase)
            serial = len(self.origins)
            self.origins[serial] = StorageOrigin(self.phase, "")
            self.labels[serial] = "workspaces"
            self.events.append(StorageEvent(serial, _WORKSPACE_BYTES))


_TABLE_OPERATIONS = (torch.ops.aten.arange, torch.ops.aten.linspace, torch.ops.aten.logspace)
_SMALL_ELEMENTS = 1 << 20


def _is_small_table(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], elements: int) -> bool:
    """Whether an operation creates a small table, or reads nothing but tables of at most that many elements."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return elements > 1 and func._overloadpacket in _TABLE_OPERATIONS
    return all(not isinstance(leaf, FakeTensor) and leaf.numel() <= elements for leaf in tensors)


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _precision(name: str, args: tuple[Any, ...]) -> str:
    """Returns the precision of a product on CUDA: cuDNN rounds fp32 to TF32, cuBLAS only if the script allows it."""
    leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if any(leaf.is_floating_point() and leaf.dtype != torch.float32 for leaf in leaves):
        return "bf16"
    rounds = name.startswith(("convolution", "rnn")) or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounds else "fp32"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local shard of a sharded tensor, and any other tensor as it is."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    """FLOPs of the scores and of their product with the values; torch 2.11's formula lacks grouped queries."""
    return _scores(query, key) * float(query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    """FLOPs of the recomputed scores, and of the gradients of scores, queries, keys and values."""
    return _scores(query, key) * float(3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Any, key: Any) -> float:
    return 2.0 * float(math.prod(query.shape[:-1]) * key.shape[-2])


# torch counts fused attention on CUDA only; without these, a CPU trace would omit it
_FORMULAS: dict[Any, Callable[..., float]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


# position of the argument `is_causal`
_CAUSAL: dict[Any, int] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}

Sizes = dict[str, int]


def replay_peak(meter: MemoryMeter, unlabeled: dict[str, str], start: int) -> tuple[Sizes, Sizes]:
    """Returns the bytes alive at the peak from event `start` on, by label and by module.

    `unlabeled` names storages without a label by the phase that allocated them.
    """
    now, peak, at = 0, 0, 0
    for index, event in enumerate(meter.events):
        now += event.size
        if now > peak and index >= start:
            peak, at = now, index
    alive: dict[int, int] = {}
    for event in meter.events[: at + 1]:
        alive[event.serial] = alive.get(event.serial, 0) + event.size
    by_label, by_module = Sizes(), Sizes()
    for serial, size in alive.items():
        if not size:
            continue
        origin = meter.origins[serial]
        name = meter.labels.get(serial) or unlabeled.get(origin.phase, origin.phase)
        by_label[name] = by_label.get(name, 0) + size
        if serial not in meter.labels:
            by_module[origin.module] = by_module.get(origin.module, 0) + size
    return by_label, by_module
