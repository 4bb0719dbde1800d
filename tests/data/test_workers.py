"""Data workers: one that is silent is named, a batch that cannot be sent is an error, and nothing stays in /tmp."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
from torch.utils import data as torch_data

from headway.data import DataLoader, worker_init
from headway.dist.failure.capture import hard_exit
from headway.dist.failure.exit_deadline import EXIT_CODE
from headway.system.log import logger
from headway.train.batches import open_loader


class Items(torch_data.Dataset[object]):
    """Eight samples, each what a function returns."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> object:
        return self.make()


def load(make: Callable[[], object]) -> DataLoader:
    return DataLoader(Items(make), batch_size=2, num_workers=1, collate_fn=list)


class Release(logging.Handler):
    """Keeps warnings with a stack of a worker that waits, and lets it go at the second one.

    On a busy machine the first warnings find it starting: then it cannot write its stack yet.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.lines = folder, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if (self.folder / "waits").exists() and record.getMessage().endswith("its stack follows"):
            self.lines.append(record.getMessage())
        if len(self.lines) == 2:
            (self.folder / "go").touch()


def test_a_worker_that_gives_nothing_is_named_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait_for_release() -> int:
        (tmp_path / "waits").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return os.getpid()

    monkeypatch.setattr(worker_init, "_POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(worker_init, "_SILENT_S", 0.2)
    handler = Release(tmp_path)
    logger.addHandler(handler)
    try:
        batches = list(load(wait_for_release))
    finally:
        logger.removeHandler(handler)
    assert len(batches) == 4
    said = (
        rf"data worker 0 \(pid {batches[0][0]}, [a-z-]+\) has returned no batch for \d+ s; its stack follows"
    )
    assert all(re.fullmatch(said, line) for line in handler.lines), handler.lines
    assert "wait_for_release" in capfd.readouterr().err


class Resume(logging.Handler):
    """Keeps warnings, and does what is said about a worker that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if found := re.search(r"pid (\d+), stopped", self.lines[-1]):
            os.kill(int(found[1]), signal.SIGCONT)


def test_a_worker_that_is_stopped_is_named_with_what_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_once() -> int:
        if not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return os.getpid()

    monkeypatch.setattr(worker_init, "_POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(worker_init, "_SILENT_S", 0.2)
    handler = Resume()
    logger.addHandler(handler)
    try:
        batches = list(load(stop_once))
    finally:
        logger.removeHandler(handler)
    pid = batches[0][0]
    (line,) = [line for line in handler.lines if "stopped" in line]
    said = (
        rf"data worker 0 \(pid {pid}, stopped\) has returned no batch for \d+ s; kill -CONT {pid} resumes it"
    )
    assert re.fullmatch(said, line), line


def test_a_batch_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(Exception, match=r"when data worker 0 sent a batch to its rank(.|\n)*Can't pickle"):
        list(load(lambda: lambda: None))


class OwnIterator:
    """As that of torchdata's StatefulDataLoader: it has workers, and is not of torch's class."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._workers = batches, batches._workers

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class Wrapping(torch_data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return OwnIterator(super().__iter__())


class Generating(torch_data.DataLoader[Any]):
    """As timm's MultiEpochsDataLoader, whose workers start with the loop."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [Wrapping, Generating])
def test_a_loader_of_torch_may_have_an_iterator_of_its_own(kind: type[torch_data.DataLoader[Any]]) -> None:
    loader = kind(Items(int), batch_size=2, num_workers=1, collate_fn=list)
    batches: Any = open_loader(loader)
    if kind is Wrapping:
        (worker,) = batches._workers
        assert "terminate" in vars(worker._popen), "it ends although it ignores SIGTERM"
    assert list(batches) == [[0, 0]] * 4


def test_an_error_that_cannot_be_sent_either_ends_the_worker() -> None:
    class Unknown(Exception):
        """A class that another process cannot find."""

    class Item:
        def __reduce__(self) -> str:
            raise Unknown

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(load(Item))


def test_workers_share_a_directory_that_goes_with_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.delitem(config, "tempdir", raising=False)
    monkeypatch.setenv("HEADWAY_HEARTBEAT", str(tmp_path))
    monkeypatch.setattr(worker_init, "_MAX_PATH_CHARS", 1000)  # no socket is made in it
    loader = load(util.get_temp_dir)
    found = {str(each) for _ in range(2) for batch in loader for each in batch}
    assert [Path(each) for each in found] == list(tmp_path.iterdir())

    monkeypatch.delitem(config, "tempdir")
    monkeypatch.setenv("HEADWAY_HEARTBEAT", str(tmp_path / "gone"))
    (own,) = {str(each) for batch in loader for each in batch}
    assert Path(own) == Path(util.get_temp_dir()) and not Path(own).is_relative_to(tmp_path)
    shutil.rmtree(own)  # as programs do that clean /tmp
    (again,) = {str(each) for batch in loader for each in batch}
    assert again != own and Path(again).is_dir()
    Path(own).mkdir()  # Python removes it at the end of the process


@pytest.mark.parametrize("own", [True, False], ids=["its own", "that of the process that it came from"])
def test_a_process_that_exits_at_once_removes_its_own_directory(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.delitem(config, "tempdir", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not own:
        util.get_temp_dir()
    if not (child := os.fork()):
        util.get_temp_dir()
        EXIT_CODE.watch()  # as `init` does
        hard_exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    left = list(tmp_path.iterdir())
    assert len(left) == (not own)
    for each in [*util._finalizer_registry.values()]:  # type: ignore[attr-defined]
        if left and str(left[0]) in (each._args or ()):
            each.cancel()  # pytest removes it


def test_a_fork_server_that_a_loader_starts_outlives_signals_which_end_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        """Raised instead of starting workers, which would import torch."""

    def start(_loader: object) -> None:
        forkserver.ensure_running()
        raise Started

    resource_tracker.ensure_running()  # as after a loader that spawns
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    monkeypatch.setattr(worker_init, "iter", start, raising=False)
    with pytest.raises(Started):
        list(DataLoader(Items(int), batch_size=2, num_workers=1, multiprocessing_context="forkserver"))
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGUSR1)  # as SLURM sends it to every process of a step
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    process.start()
    assert forkserver._forkserver._forkserver_pid == server  # type: ignore[attr-defined]
    process.terminate()
    process.join(60)
    try:
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
