"""Seeds: torch is equal on all ranks until training, data noise never is, and neighbors are not alike."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as td
from hypothesis import given, strategies as st

from headway.dist.seeding import derive_seed, seed, separate_streams
from headway.errors import UsageError
from headway.testing import ranks


@pytest.fixture(autouse=True)
def torch_switches() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1], before[2]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if before[3] is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = before[3]


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def everybodys(value: object) -> list[object]:
    values: list[object] = [None] * td.get_world_size()
    td.all_gather_object(values, value)
    return values


@ranks(3)
def test_weights_are_equal_and_data_noise_differs() -> None:
    seed(7)
    weights, python, numpy = zip(*everybodys(draws()), strict=True)
    assert len(set(weights)) == 1
    assert len(set(python)) == len(set(numpy)) == 3


@ranks(3)
def test_streams_separate_once_and_that_of_rank_0_continues() -> None:
    seed(7)
    torch.rand(3)
    following = torch.get_rng_state()
    separate_streams(td.get_rank())
    assert torch.equal(torch.get_rng_state(), following) is (td.get_rank() == 0)
    first = torch.rand(()).item()
    separate_streams(td.get_rank())
    assert len({*everybodys(first), *everybodys(torch.rand(()).item())}) == 6


@ranks(3)
def test_shared_scope_keeps_every_generator_equal() -> None:
    seed(7, scope="shared")
    separate_streams(td.get_rank())
    drawn = draws()
    assert everybodys(drawn) == [drawn] * 3
    seed(7)


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    seed(3)
    first = draws()
    seed(4)
    assert not set(draws()) & set(first)
    seed(3)
    assert draws() == first


def test_numbers_do_not_change_between_versions() -> None:
    """Runs that are resumed after an upgrade must see the noise that they would have seen."""
    assert derive_seed(0, "torch.shared") == 5076992270350789267


def test_neighbours_do_not_collide() -> None:
    seeds = {derive_seed(base, "noise", rank) for base in range(100) for rank in range(100)}
    assert len(seeds) == 100 * 100
    assert len({s % 2**32 for s in seeds}) > 9990  # torch's CPU generator uses the lower half only
    assert max(seeds) > 2**63


@given(base=st.integers(0, 2**64 - 1), rank=st.integers(0, 2**20))
def test_purposes_do_not_share_seeds(base: int, rank: int) -> None:
    assert derive_seed(base, "a", rank) != derive_seed(base, "b", rank)
    assert 0 <= derive_seed(base, "a", rank) < 2**64


@pytest.mark.parametrize("base", [0, 2**32, 2**64 - 1])
def test_all_of_64_bits_count(base: int) -> None:
    seed(base)
    first = draws()
    seed(base ^ (1 << 63))
    assert not set(draws()) & set(first)


def test_deterministic_sets_the_switches_and_respects_the_users_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.backends.cudnn.benchmark = True
    seed(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_deterministic_sets_the_workspace_when_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seed(0, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_without_deterministic_every_switch_stays() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    seed(0)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("base", [-1, 2**64, True, 1.0, "7", None, np.int64(3)])
def test_bad_seeds_are_refused_before_anything_changes(base: object) -> None:
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(UsageError, match="give"):
        seed(base)  # type: ignore[arg-type]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(UsageError, match="'global'"):
        seed(0, scope="global")  # type: ignore[arg-type]
