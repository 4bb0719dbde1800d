from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from headway.testing import leaks


@pytest.fixture(scope="module", autouse=True)
def _running_resource_tracker() -> None:
    """It starts at the first use of shared memory, and takes a moment until it can be told from other children."""
    resource_tracker.ensure_running()
    wait_until(
        lambda: any(map(leaks.is_resource_tracker, psutil.Process().children())),
        "the tracker runs",
        interval_s=0.01,
    )


@contextmanager
def _process(_: Path) -> Iterator[str]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield f"process {child.pid} (sleep 600)"
        child.kill()


@contextmanager
def _zombie(_: Path) -> Iterator[str]:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield f"process {child.pid} (ended, but was not waited for)"
    child.wait()


@contextmanager
def _listening_socket(_: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"socket 127.0.0.1:{server.getsockname()[1]} (listen)"


@contextmanager
def _open_file(folder: Path) -> Iterator[str]:
    with (folder / "notes.txt").open("w") as file:
        yield f"open file {file.fileno()}: {folder / 'notes.txt'}"


@contextmanager
def _shared_memory(_: Path) -> Iterator[str]:
    memory = shared_memory.SharedMemory(create=True, size=64, name=f"headway-test-{os.getpid()}")
    memory.close()  # not held by a descriptor or a mapping any more
    yield f"shared memory /dev/shm/{memory.name}"
    memory.unlink()


@contextmanager
def _thread(_: Path) -> Iterator[str]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="kneader")
    thread.start()
    yield "thread kneader"
    end.set()
    thread.join()


@contextmanager
def _variable(_: Path) -> Iterator[str]:
    os.environ["OVEN"] = "secret heat"
    yield "environment variable OVEN"
    del os.environ["OVEN"]


@contextmanager
def _removed_variable(_: Path) -> Iterator[str]:
    path = os.environ.pop("PATH")
    yield "environment variable PATH"
    os.environ["PATH"] = path


@contextmanager
def _handler(_: Path) -> Iterator[str]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield "handler of SIGUSR1"
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def _stream(_: Path) -> Iterator[str]:
    before, sys.stderr = sys.stderr, sys.__stderr__
    yield "sys.stderr, which was replaced"
    sys.stderr = before


_LEAKS = [
    _process,
    _zombie,
    _listening_socket,
    _open_file,
    _shared_memory,
    _thread,
    _variable,
    _removed_variable,
    _handler,
    _stream,
]


@pytest.mark.parametrize("leak", _LEAKS)
def test_each_leak_is_named_until_it_is_mended(leak: Callable[[Path], object], tmp_path: Path) -> None:
    # what other suites on this machine leave in shared memory for a moment is seen by one of the tests at most
    memory = leak is _shared_memory
    before = leaks.snapshot(shared_memory=memory)
    with leak(tmp_path) as line:  # type: ignore[attr-defined]
        assert leaks.since(before, settle_s=0.0) == [line]
    assert leaks.since(before, settle_s=0.0) == []


def test_what_torch_installs_for_good_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(*_: object) -> None:
        pass

    handler.__module__ = "torch.utils.data._utils.signal_handling"
    before = leaks.snapshot(shared_memory=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    previous = signal.signal(signal.SIGCHLD, handler)
    try:
        assert leaks.since(before, settle_s=0.0) == []
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_sockets_are_looked_up_once_however_long_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel goes through the connections of all processes for each: it was a sixth of the time of some tests."""
    looked_up = []
    usual = psutil.Process.net_connections
    monkeypatch.setattr(
        psutil.Process, "net_connections", lambda *args, **kw: looked_up.append(1) or usual(*args, **kw)
    )
    before = leaks.snapshot(shared_memory=False)
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0)):
        assert len(leaks.since(before, settle_s=0.2)) == 2
    assert len(looked_up) == 1


def test_what_is_about_to_end_gets_time_to_end() -> None:
    before = leaks.snapshot()
    thread = threading.Thread(target=threading.Event().wait, args=(0.3,))
    thread.start()
    assert leaks.since(before, settle_s=30.0) == []
    assert not thread.is_alive()


def test_a_file_opened_anew_under_another_number_is_no_leak(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.touch()
    first, second = path.open(), None
    before = leaks.snapshot(shared_memory=False)
    try:
        second = path.open()
        assert len(leaks.since(before, settle_s=0.0)) == 1
        first.close()
        assert leaks.since(before, settle_s=0.0) == []
    finally:
        first.close()
        if second:
            second.close()


def test_multiprocessings_own_helper_is_no_leak() -> None:
    code = (
        "from headway.testing import leaks\n"
        "from multiprocessing import resource_tracker, shared_memory\n"
        "before = leaks.snapshot(shared_memory=False)\n"
        "memory = shared_memory.SharedMemory(create=True, size=64); memory.close(); memory.unlink()\n"
        "import psutil; assert psutil.Process().children(), 'the helper runs'\n"
        "print(leaks.since(before, settle_s=0.0))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert ended.stdout == "[]\n", ended.stderr


def test_shared_memory_with_a_name_that_tells_nothing_is_ours_while_we_use_it() -> None:
    before = leaks.own_shared_memory()
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert leaks.shared_memory_since(before) == [f"shared memory /dev/shm/{memory.name}"]
        memory.close()
        assert leaks.shared_memory_since(before) == [], "any process of this user may have left it"
    finally:
        memory.unlink()


def test_shared_memory_of_a_stranger_is_not_ours() -> None:
    code = (
        "from multiprocessing import resource_tracker, shared_memory\n"
        "memory = shared_memory.SharedMemory(create=True, size=64)\n"
        "print(memory.name, flush=True); input(); memory.close(); memory.unlink()"
    )
    before = leaks.own_shared_memory()
    # a grandchild that has lost its parent is a stranger
    launch = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", launch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        child.wait(timeout=180)
        assert Path("/dev/shm", name) in leaks.own_shared_memory() - before
        assert leaks.shared_memory_since(before) == []
        child.communicate("\n", timeout=180)


def test_directories_in_shared_memory_count_if_headway_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in /dev/shm, where tests of other suites on this machine would find them."""
    monkeypatch.setattr(leaks, "_SHARED_MEMORY", tmp_path)
    before = leaks.own_shared_memory()
    with (
        tempfile.TemporaryDirectory(dir=tmp_path, prefix="photos-"),
        tempfile.TemporaryDirectory(dir=tmp_path, prefix="headway-test-") as cache,
    ):
        assert leaks._compare_memory(before, leaks.own_shared_memory()) == [f"shared memory {cache}"]


def test_the_fixture_fails_a_test_that_leaks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os

        def test_clean(no_leaks):
            os.environ["OVEN"] = "on"
            del os.environ["OVEN"]

        def test_leaky(no_leaks):
            os.environ["OVEN"] = "on"
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left something behind:", "*environment variable OVEN"])
    result.stdout.no_fnmatch_line("*secret*")
