"""The model of CUDA's caching allocator: its rules, and histories of a real one (`benchmarks/peaks.py --reserved`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.plan.tracer.process.allocator import Allocator, replay

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB)],
)  # fmt: skip
def test_segments_of_requests(size: int, reserved: int) -> None:
    """2 MiB for requests up to 1 MiB, 20 MiB under 10 MiB, and whole multiples of 2 MiB for others."""
    own = Allocator()
    own.allocate(size)
    assert own.reserved == reserved


def test_blocks_are_split_if_more_than_a_mebibyte_is_left() -> None:
    own = Allocator()
    own.free(own.allocate(20 * MIB))
    assert own.allocate(19 * MIB).size == 20 * MIB  # one MiB is left
    own.free(own.allocate(40 * MIB))
    assert own.allocate(38 * MIB).size == 38 * MIB
    assert own.reserved == 60 * MIB


def test_of_equal_blocks_the_one_with_the_lowest_address_is_used() -> None:
    """Whichever was freed last: the allocator sorts its blocks by size and address."""
    own = Allocator()
    first, second = own.allocate(20 * MIB), own.allocate(20 * MIB)
    own.free(second)
    own.free(first)
    assert own.allocate(20 * MIB) is first


def test_neighbors_that_are_free_become_one_block() -> None:
    own = Allocator()
    parts = [own.allocate(5 * MIB) for _ in range(4)]
    for part in (parts[2], parts[0], parts[1], parts[3]):
        own.free(part)
    assert own.allocate(20 * MIB).size == 20 * MIB and own.reserved == 20 * MIB


def test_workspaces_of_an_earlier_batch_save_a_segment() -> None:
    """GPT-2 124M with 32 sequences: the workspace of the first backward splits the block of the logits (40,848 MiB).

    Where a batch of 2 was measured before, the workspaces were already there (34,596 MiB, 15 % less), as if they were
    allocated with the model. A run starts without them.
    """
    logits, workspace = 600 * MIB, 32 * MIB

    def step(number: int, events: list[tuple[int, int]], *, first: bool) -> None:
        events += [(number, logits), (number + 1, logits), (number, -logits), (number + 1, -logits)]
        if first:
            events.append((1, workspace))

    fresh: list[tuple[int, int]] = []
    step(10, fresh, first=True)
    step(20, fresh, first=False)
    later: list[tuple[int, int]] = [(1, workspace)]
    step(10, later, first=False)
    step(20, later, first=False)
    own, measured = (replay(events, built=0, start=0)[1] for events in (fresh, later))
    assert (own, measured) == (3 * logits, 2 * logits + workspace)


def test_a_history_of_the_real_allocator_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries as torch.cuda.memory records them: requests in bytes, by address, which are used again."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import peaks

    entries = [
        {"action": "segment_alloc", "addr": 4096, "size": 20 * MIB},
        {"action": "alloc", "addr": 4096, "size": 5 * MIB - 100},
        {"action": "free_requested", "addr": 4096, "size": 5 * MIB - 100},
        {"action": "free_completed", "addr": 4096, "size": 5 * MIB - 100},
        {"action": "alloc", "addr": 4096, "size": 30 * MIB},
    ]
    events = peaks.history_events(entries)
    assert events == [(0, 5 * MIB), (0, -5 * MIB), (1, 30 * MIB)]
    assert replay(events, built=0, start=0)[1] == 50 * MIB
    blocks = [
        {"state": "inactive", "size": 512, "requested_size": 0},
        {"state": "active_allocated", "size": 1024, "requested_size": 700},
    ]
    live = peaks.live_blocks([{"address": 8192, "blocks": blocks}])
    assert live == {8704: 700}
    assert peaks.history_events([{"action": "free_requested", "addr": 8704, "size": 700}], live) == [
        (0, 1024),
        (0, -1024),
    ]
    rows = peaks.differences([(0, 5 * MIB), (1, 512), (1, -512)], [(0, 5 * MIB), (1, 5 * MIB), (2, 1024)])
    assert rows == [(5 * MIB, 1, 2), (1024, 0, 1), (512, 1, 0)]
