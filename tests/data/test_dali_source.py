"""`DaliSource`: the bytes of samples in the order of a `ShardLoader`; test_dali.py runs it within DALI."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.data import DaliSource, ShardLoader, pack
from headway.errors import HeadwayError, UsageError


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return pack(
        ({"__key__": f"{n:03d}", "jpg": b"photo %d" % n, "cls": n} for n in range(50)),
        tmp_path,
        shard_size=20_480,
    )


def labels(batch: tuple[list[np.ndarray], ...]) -> list[int]:
    assert [bytes(image) for image in batch[0]] == [b"photo " + bytes(label) for label in batch[1]]
    return [int(bytes(label)) for label in batch[1]]


def expected(shards: list[Path], passes: int) -> list[list[int]]:
    loader = ShardLoader(shards, batch_size=8, seed=3, decoders={"jpg": bytes})
    return [batch["cls"].tolist() for _ in range(passes) for batch in loader]


def test_batches_are_those_of_a_shard_loader_over_passes(shards: list[Path]) -> None:
    source = DaliSource(shards, batch_size=8, seed=3)
    found = [labels(batch) for _ in range(2) for batch in source]
    assert found == expected(shards, 2) and len(found) == 12


def test_a_new_source_resumes_after_the_batch_that_came_out_of_the_pipeline(shards: list[Path]) -> None:
    truth = expected(shards, 2)
    source = DaliSource(shards, batch_size=8, seed=3)
    batches = [next(source) for _ in range(5)]  # DALI has read five, and returned two
    assert [[int(end[0]) for end in batch[2]] for batch in batches[:2]] == [[8] * 8, [16] * 8]
    resumed = DaliSource(shards, batch_size=8, seed=3)
    resumed.load_state_dict(source.state_dict(int(batches[1][2][0][0])))
    assert [labels(batch) for _ in range(2) for batch in resumed] == truth[2:]
    with pytest.raises(UsageError, match="no batch of the last 256 ends at this position"):
        source.state_dict(17)


def test_what_dali_does_is_refused_and_a_missing_part_is_named(shards: list[Path]) -> None:
    with pytest.raises(UsageError, match="remove it, or use ShardLoader"):
        DaliSource(shards, batch_size=8, transform=lambda sample, _: sample)
    with pytest.raises(HeadwayError, match="has no 'png' but jpg, cls"):
        next(DaliSource(shards, batch_size=8, parts=("jpg", "png")))
