"""`@ranks` as users see it, used on itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import headway
from headway.errors import UsageError
from headway.system.failpoints import failpoint
from headway.testing import faults, ranks


class Oven:
    def __init__(self, degrees: int) -> None:
        self.degrees = degrees


@pytest.fixture
def oven() -> Oven:
    return Oven(180)


@pytest.fixture
def kitchen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITCHEN", "open")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fault_on_rank_1() -> Iterator[None]:
    with faults.at("bake", rank=1, nth=2, action="raise"):
        yield


@ranks(2)
def test_ranks_form_a_group() -> None:
    mine = torch.tensor([float(headway.rank() + 1)])
    c10d.all_reduce(mine)
    assert mine.item() == 3
    assert headway.world_size() == 2
    assert c10d.get_backend() == "gloo"


@ranks(1)
def test_a_group_of_one() -> None:
    assert headway.world_size() == 1
    assert c10d.get_world_size() == 1
    c10d.barrier()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@ranks(2)
def test_reuse_part_1(notebook: Path) -> None:
    (notebook / str(headway.rank())).write_text(str(os.getpid()))


@ranks(2)
def test_reuse_part_2(notebook: Path) -> None:
    assert (notebook / str(headway.rank())).read_text() == str(os.getpid())


@ranks(2)
def test_a_process_of_its_own_for_each_rank() -> None:
    pids = headway.all_gather_object(os.getpid())
    assert len({*pids, os.getppid()}) == 3
    assert os.getppid() == headway.broadcast_object(os.getppid())


@ranks(2)
def test_fixtures_are_made_once_and_handed_to_all(tmp_path: Path, oven: Oven) -> None:
    assert oven.degrees == 180
    (tmp_path / str(headway.rank())).touch()
    headway.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("n", [pytest.param(1, marks=ranks(1)), pytest.param(2, marks=ranks(2))])
def test_a_parameter_may_say_how_many(n: int) -> None:
    assert headway.world_size() == n


@ranks(2)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [Oven(3)])
def test_parameters(a: int, b: Oven) -> None:
    assert (a in (1, 2), b.degrees) == (True, 3)


@ranks(2)
class TestMethods:
    factor = 2

    def setup_method(self) -> None:
        self.prepared = 21

    def test_method(self) -> None:
        assert self.prepared * self.factor == 42
        assert headway.world_size() == 2


class TestOuter:
    class TestInner:
        @ranks(2)
        def test_inner(self) -> None:
            assert headway.world_size() == 2


@ranks(2)
@pytest.mark.usefixtures("kitchen")
def test_environment_and_folder_are_those_of_pytest(tmp_path: Path) -> None:
    assert os.environ["KITCHEN"] == "open"
    assert Path.cwd() == tmp_path
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert os.environ["RANK"] == str(headway.rank())


@ranks(2)
def test_the_environment_is_back_afterwards() -> None:
    assert "KITCHEN" not in os.environ
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ


@ranks(2)
def test_monkeypatch_patches_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITCHEN", str(headway.rank()))
    assert headway.all_gather_object(os.environ["KITCHEN"]) == ["0", "1"]


@ranks(2)
def test_warnings_are_errors_here_as_everywhere() -> None:
    with pytest.raises(UserWarning, match="hot"):
        warnings.warn("hot", UserWarning, stacklevel=1)


@ranks(2)
@pytest.mark.filterwarnings("ignore:quite hot")
def test_a_mark_filters_warnings() -> None:
    warnings.warn("quite hot", UserWarning, stacklevel=1)


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@ranks(2)
def test_torch_as_usual_leaks_nothing() -> None:
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for batch in loader:
        model(batch.float()).sum().backward()


@ranks(2)
@pytest.mark.usefixtures("fault_on_rank_1")
@pytest.mark.parametrize("test", ["one", "the next"])  # which counts from the beginning
def test_a_fault_of_the_test_strikes_in_its_rank(test: str) -> None:  # noqa: ARG001
    failpoint("bake")
    if headway.rank() == 1:
        with pytest.raises(RuntimeError):
            failpoint("bake")
    else:
        failpoint("bake")


@ranks(2)
def test_leaving_the_group_costs_the_pool_but_not_the_test() -> None:
    headway.dist.leave()
    assert not c10d.is_initialized()


@ranks(2)
def test_after_leaving_there_is_a_new_group() -> None:
    assert headway.world_size() == c10d.get_world_size() == 2


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_a_senseless_number_of_ranks_is_refused(n: Any) -> None:
    with pytest.raises(UsageError, match="nproc must be an integer of at least 1"):
        ranks(n)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_senseless_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(UsageError, match="more than 0 seconds"):
        ranks(2, timeout=timeout)
