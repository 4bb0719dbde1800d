"""How the processes of ranks start: as forks of one that has imported torch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import psutil
import pytest

import headway
from headway.errors import RankFailure
from headway.testing import fork_server, ranks
from headway.testing.fork_server import ForkServer
from headway.testing.pool import RankPools


@pytest.fixture
def pytest_pid() -> int:
    return os.getpid()


@ranks(2)
def test_a_rank_is_a_fork_that_pytest_waits_for(pytest_pid: int) -> None:
    assert b"headway.testing.fork_server" in Path("/proc/self/cmdline").read_bytes()
    assert os.getppid() == pytest_pid
    assert os.getsid(0) == os.getpid()


@ranks(2)
def test_ranks_draw_different_random_numbers() -> None:
    assert len(set(headway.all_gather_object(numpy.random.random()))) == 2


def test_where_processes_cannot_be_adopted_a_rank_is_an_interpreter_of_its_own() -> None:
    before = set(psutil.Process().children())
    pools = RankPools(fork=False)
    try:
        pools.get(1, ["-c", os.devnull], Path.cwd())
        (rank,) = set(psutil.Process().children()) - before
        assert "headway.testing.worker" in " ".join(rank.cmdline())
    finally:
        pools.close()


def test_a_server_fits_while_what_torch_read_at_import_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = ForkServer(tmp_path)
    try:
        monkeypatch.setenv("KITCHEN", "open")
        assert server.fits()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert not server.fits()
    finally:
        server.close()


def test_a_server_that_has_ended_is_reported_with_what_it_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no oven here')")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(tmp_path)
    try:
        with pytest.raises(RankFailure, match=r"(?s)the process that forks the ranks .*no oven here"):
            server.fork(stdout=1, stderr=2, connection=0, stack=0)
        assert not server.fits()
    finally:
        server.close()


@pytest.mark.parametrize(
    "name", ["PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "ATEN_CPU_CAPABILITY"]
)
def test_what_torch_reads_when_it_is_imported_needs_a_server_of_its_own(name: str) -> None:
    assert fork_server._select({name: "1", "HOME": "/"}) == {name: "1"}
