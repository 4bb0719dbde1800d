"""A model of CUDA's caching allocator, replayed on the log of a step: reserved bytes, and remainders of unsplit blocks.

The rules are those of torch's allocator with default options. Requests are rounded to 512 bytes. Requests up to 1 MiB
come from segments of 2 MiB, requests under 10 MiB from segments of 20 MiB, and each larger one from its own segment,
rounded to 2 MiB. The smallest free block that fits is used, at the lowest address if several are equal, and split if
more than 1 MiB (512 bytes in small segments) is left. Addresses of segments are assumed to rise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(eq=False)
class _CachedBlock:
    size: int
    small: bool
    address: int = 0
    before: _CachedBlock | None = None
    after: _CachedBlock | None = None
    is_free: bool = False


@dataclass
class Allocator:
    """Allocates and frees blocks, and records the peaks."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _free: dict[bool, list[tuple[int, int, _CachedBlock]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    _end: int = 0
    """The address behind the last segment."""

    def allocate(self, size: int) -> _CachedBlock:
        small = size <= _MIB
        block = self._best_fit(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > _MIB:
            rest = _CachedBlock(left, small, block.address + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._release(rest)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _CachedBlock) -> None:
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._withdraw(other)
                self._merge(block, other)
        self._release(block)

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated

    def _segment(self, size: int, small: bool) -> _CachedBlock:
        segment_bytes = (
            2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        )
        self.reserved += segment_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        address, self._end = self._end, self._end + segment_bytes
        return _CachedBlock(segment_bytes, small, address)

    def _best_fit(self, size: int, small: bool) -> _CachedBlock | None:
        pool = self._free[small]
        index = bisect_left(pool, (size, -1))
        return pool.pop(index)[2] if index < len(pool) else None

    def _release(self, block: _CachedBlock) -> None:
        block.is_free = True
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _withdraw(self, block: _CachedBlock) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address), key=lambda entry: entry[:2])]

    def _merge(self, block: _CachedBlock, other: _CachedBlock) -> None:
        block.size += other.size
        block.address = min(block.address, other.address)
        if other is block.before:
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block


def replay(events: Sequence[tuple[int, int]], *, built: int, start: int) -> tuple[int, int]:
    """Returns the peak of allocated bytes from event `start` on, and of reserved bytes since event `built`.

    At `built`, when the model is complete, live storages are allocated again from scratch: large models are built on
    the CPU or the meta device and leave no holes on the GPU.
    """
    allocator, held = Allocator(), dict[int, tuple[_CachedBlock, int]]()
    for index, (serial, change) in enumerate(events):
        if index == built:
            sizes = {key: size for key, (_, size) in held.items()}
            allocator = Allocator()
            held = {key: (allocator.allocate(size), size) for key, size in sizes.items()}
        if index == start:
            allocator.reset_peaks()
        if serial in held:
            block, size = held.pop(serial)
            allocator.free(block)
            change += size
        if change > 0:
            held[serial] = (allocator.allocate(change), change)
    return allocator.peak_allocated, allocator.peak_reserved
