from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from headway.errors import UsageError
from headway.system import failpoints
from headway.system.environment import FAILPOINT
from headway.system.failpoints import failpoint
from headway.testing import faults


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    failpoints.reset_calls()


def _child(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from headway.system.failpoints import failpoint\n{code}"]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=180)


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAILPOINT, raising=False)
    failpoint("here")
    assert not failpoints._calls


def test_raise_strikes_at_its_own_name_only() -> None:
    with faults.at("here", action="raise"):
        failpoint("there")
        with pytest.raises(RuntimeError, match="failpoint here"):
            failpoint("here")


def test_nth_counts_the_calls_of_that_name_and_strikes_once() -> None:
    with faults.at("here", nth=3, action="raise"):
        failpoint("here")
        failpoint("there")
        failpoint("here")
        with pytest.raises(RuntimeError):
            failpoint("here")
        failpoint("here")


def test_rank_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with faults.at("here", rank=1, action="raise"):
        monkeypatch.setenv("RANK", "0")
        failpoint("here")
        monkeypatch.setenv("RANK", "1")
        failpoints.reset_calls()
        with pytest.raises(RuntimeError):
            failpoint("here")


def test_a_process_without_rank_is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with faults.at("here", rank=0, action="raise"), pytest.raises(RuntimeError):
        failpoint("here")


def test_errno_raises_the_oserror_of_that_name() -> None:
    with faults.at("here", action="errno=ENOSPC"), pytest.raises(OSError) as caught:
        failpoint("here")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.strerror == os.strerror(errno.ENOSPC)


def test_kill9_kills() -> None:
    ended = _child(
        "print('before', flush=True); failpoint('here'); print('after')", HEADWAY_FAILPOINT="here:kill9"
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "before\n"


def test_exit_ends_with_that_code_and_without_cleaning_up() -> None:
    code = "import atexit; atexit.register(print, 'cleaned up'); failpoint('here')"
    ended = _child(code, HEADWAY_FAILPOINT="here:exit=7")
    assert (ended.returncode, ended.stdout) == (7, "")


def test_stop_stops_until_continued() -> None:
    code = "from headway.system.failpoints import failpoint; failpoint('here'); print('went on')"
    environ = os.environ | {"HEADWAY_FAILPOINT": "here:stop"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
    ) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=180)[0] == "went on\n"


def test_sleep_waits() -> None:
    code = "import time; t = time.monotonic(); failpoint('here'); print(time.monotonic() - t)"
    assert 0.3 <= float(_child(code, HEADWAY_FAILPOINT="here:sleep=0.3").stdout) < 30


def test_several_faults_in_one_variable() -> None:
    with faults.at("one", action="errno=EIO") + faults.at("two", action="raise"):
        with pytest.raises(OSError):
            failpoint("one")
        with pytest.raises(RuntimeError):
            failpoint("two")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("here", "names no failpoint"),
        (":kill9", "names no failpoint"),
        ("here:", "'' is not an action"),
        ("here:boom", "'boom' is not an action"),
        ("here:kill9=1", "'kill9=1' is not an action"),
        ("here:exit", "'exit' is not an action"),
        ("here:exit=256", "'exit=256' is not an action"),
        ("here:exit=-1", "'exit=-1' is not an action"),
        ("here:sleep=soon", "'sleep=soon' is not an action"),
        ("here:errno=ENOTHING", "'errno=ENOTHING' is not an action"),
        ("here:rank=x:raise", "'rank=x' is not rank=R or nth=N"),
        ("here:nth=0:raise", "'nth=0' is not rank=R or nth=N"),
        ("here:host=a:raise", "'host=a' is not rank=R or nth=N"),
        ("here:raise,there:boom", "'boom' is not an action"),
        ("here:raise,", "names no failpoint"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_valid_actions(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setenv(FAILPOINT, text)
    with pytest.raises(UsageError) as caught:
        failpoint("elsewhere")
    assert problem in str(caught.value)
    for action in ("kill9", "raise", "stop", "exit=CODE", "sleep=SECONDS", "errno=NAME"):
        assert action in str(caught.value)


def test_faults_nest_and_put_the_variable_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "outer:raise")
    with faults.at("inner", action="raise") as fault:
        assert os.environ[FAILPOINT] == "inner:raise"
        with fault:  # the same one again
            pass
        assert os.environ[FAILPOINT] == "inner:raise"
    assert os.environ[FAILPOINT] == "outer:raise"


def test_each_with_block_counts_from_one() -> None:
    for _ in range(2):
        with faults.at("here", nth=2, action="raise"):
            failpoint("here")
            with pytest.raises(RuntimeError):
                failpoint("here")


def test_a_fault_is_checked_when_it_is_made() -> None:
    with pytest.raises(UsageError, match="'boom' is not an action"):
        faults.at("here", action="boom")


def test_a_script_on_ranks_with_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    script = tmp_path / "train.py"
    script.write_text(
        "import headway\n"
        "from headway.system.failpoints import failpoint\n"
        "headway.init()\n"
        "failpoint('step')\n"
        "headway.barrier()\n"
        "print('done', headway.rank(), flush=True)\n"
    )
    healthy = faults.run(script, nproc=2)
    assert healthy.returncode == 0, healthy.stderr
    assert healthy.stdout.count("done") == 2
    faulty = faults.run(script, nproc=2, fault=faults.at("step", rank=1, action="exit=7"))
    assert faulty.returncode != 0
    assert "done" not in faulty.stdout
    assert "rank 1 of 2" in faulty.stderr
