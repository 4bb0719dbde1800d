"""A memory meter: every storage that appears and disappears during a step, as the CUDA allocator would count it."""

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

BLOCK = 512
"""CUDA's caching allocator hands out multiples of this."""
WORKSPACE = 32 << 20
"""cuBLAS's workspace on Hopper; 8 MiB on older devices."""
_BLAS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"})


class Event(NamedTuple):
    """A storage appears (positive) or disappears (negative)."""

    serial: int
    size: int


class Birth(NamedTuple):
    """When and where a storage was made."""

    phase: str
    module: str
    operation: str


class Work(NamedTuple):
    """A kernel, as a roofline sees it."""

    operation: str
    flops: float
    bytes: int


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs storages and counts FLOPs while it is on.

    Storages are told apart by a serial number; labels such as "gradients" are given later, when it is known what a
    storage became, and the log is replayed to see what was alive at the peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.births: dict[int, Birth] = {}
        self.labels: dict[int, str] = {}
        self.queue: list[tuple[str, Work]] = []  # phase and kernel, in the order of their launch
        self.phase = "build"
        self.module = ""
        self._workspaces: set[str] = set()  # phases that have one
        self._restore: Callable[[], None] = lambda: None
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, FakeTensor, nn.Parameter) for kind in types):
            return NotImplemented  # a sharded tensor: its pieces come back here one by one
        if self.phase == "build" and _small_and_real(func, args, kwargs or {}):
            with (
                unset_fake_temporarily()
            ):  # drop rates, widths, tables: models look at such values while they are built
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        made = len(self.births)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, name)
        if len(self.births) > made or func._schema.is_mutable:  # a view is no work
            self._count(func, name, args, kwargs or {}, out)
        return out

    def __enter__(self) -> Meter:
        """Also watches storages that are resized in place: that is how FSDP frees what it gathered."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            self._see(storage, "resize_")
            return out

        self._restore = lambda: setattr(torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._restore()

    def see(self, tensor: torch.Tensor, operation: str = "") -> int:
        """The serial number of a tensor's storage; new storages are logged."""
        return self._see(_plain(tensor).untyped_storage(), operation)

    def _see(self, storage: Any, operation: str) -> int:
        key = id(storage)
        known = self._alive.get(key)
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if known is not None and known[2]() is storage:
            serial, old, ref = known
            if old != size:
                self.events.append(Event(serial, size - old))
                self._alive[key] = (serial, size, ref)
            return serial
        serial = len(self.births)
        self.births[serial] = Birth(self.phase, self.module, operation)
        self._alive[key] = (serial, size, weakref.ref(storage, self._gone(key, serial)))
        self.events.append(Event(serial, size))
        return serial

    def _gone(self, key: int, serial: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            known = self._alive.get(key)
            if known is not None and known[0] == serial:
                del self._alive[key]
                self.events.append(Event(serial, -known[1]))

        return forget

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Says what a storage is."""
        self.labels[self.see(tensor)] = name

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _count(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Adds a kernel: its FLOPs, and the bytes it reads and writes."""
        formula = _FORMULAS.get(func) or flop_registry.get(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
        touched = sum(_bytes(leaf) for leaf in tree_leaves((args, kwargs, out)))
        if func in _CAUSAL and len(args) > _CAUSAL[func] and args[_CAUSAL[func]]:
            name = f"{name} (causal)"  # CUDA's kernels skip the masked half; the count stays whole
        self.queue.append((self.phase, Work(name, flops, touched)))
        if name in _BLAS:
            self._give_workspace()

    def _give_workspace(self) -> None:
        """cuBLAS has one for each thread that multiplies, and keeps it: the caller's, and that of the backward pass."""
        if self.phase in ("forward", "backward") and self.phase not in self._workspaces:
            self._workspaces.add(self.phase)
            serial = len(self.births)
            self.births[serial] = Birth(self.phase, "", "workspace")
            self.labels[serial] = "workspaces"
            self.events.append(Event(serial, WORKSPACE))


_MADE_REAL = (torch.ops.aten.arange, torch.ops.aten.linspace, torch.ops.aten.logspace)
_SMALL = 1 << 20


def _small_and_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation makes a small table, or works on nothing but such tables."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return func._overloadpacket in _MADE_REAL
    return all(not isinstance(leaf, FakeTensor) and leaf.numel() <= _SMALL for leaf in tensors)


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on this rank, when it is one shard of many."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    """Scores, and their product with the values. Our own: torch 2.11's does not know grouped queries."""
    return _scores(query, key) * float(query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    """The scores again, and the gradients of scores, queries, keys and values."""
    return _scores(query, key) * float(3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Any, key: Any) -> float:
    return 2.0 * float(math.prod(query.shape[:-1]) * key.shape[-2])


# torch counts fused attention on CUDA only; a CPU trace would silently leave it out
_FORMULAS: dict[Any, Callable[..., float]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


# where these take `is_causal`
_CAUSAL: dict[Any, int] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}

Sizes = dict[str, int]


def replay(meter: Meter, others: dict[str, str], start: int = 0) -> tuple[int, Sizes, Sizes, Sizes]:
    """Peak bytes from event `start` on, and what was alive then: by label, by module, by operation.

    `others` names storages without a label by the phase they were made in.
    """
    now, peak, at = 0, 0, 0
    for index, event in enumerate(meter.events):
        now += event.size
        if now > peak and index >= start:
            peak, at = now, index
    alive: dict[int, int] = {}
    for event in meter.events[: at + 1]:
        alive[event.serial] = alive.get(event.serial, 0) + event.size
    by_label, by_module, by_operation = Sizes(), Sizes(), Sizes()
    for serial, size in alive.items():
        if not size:
            continue
        birth = meter.births[serial]
        name = meter.labels.get(serial) or others.get(birth.phase, birth.phase)
        by_label[name] = by_label.get(name, 0) + size
        if serial not in meter.labels:
            by_module[birth.module] = by_module.get(birth.module, 0) + size
            by_operation[birth.operation] = by_operation.get(birth.operation, 0) + size
    return peak, by_label, by_module, by_operation
