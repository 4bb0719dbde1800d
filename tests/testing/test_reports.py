"""What people read when a test on ranks does not pass. One pytest run, looked at from many sides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.dist.failure import record
from headway.testing import process, runner
from headway.testing.protocol import RankReport

_SCENARIOS = Path(__file__).parent / "scenarios"
_OWN_SHARED_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
"""for a session that leaves shared memory behind on purpose, which tests in other workers would report"""


def _may_mount() -> bool:
    try:
        return subprocess.run([*_OWN_SHARED_MEMORY, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


_MAY_MOUNT = _may_mount()
pytestmark = [
    pytest.mark.timeout(300),  # a dozen groups of processes are started
    *([] if _MAY_MOUNT else [pytest.mark.alone]),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    outcome: str
    text: str
    output: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Session:
    cases: dict[str, Case]
    notebook: Path
    stdout: str
    exit_code: int

    def pids(self, test: str) -> list[str]:
        return [path.read_text() for path in sorted(self.notebook.glob(f"{test}-*"))]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("session")
    notebook = tmp_path_factory.mktemp("notebook")
    (folder / "kitchen").mkdir()
    shutil.copy(_SCENARIOS / "shared.py", folder / "conftest.py")
    for name in ("failing", "unimportable"):
        shutil.copy(_SCENARIOS / f"{name}.py", folder / "kitchen" / f"test_{name}.py")
    files = ["kitchen/test_unimportable.py", "kitchen/test_failing.py"]
    options = ["-c", os.devnull, "--rootdir=.", "--import-mode=importlib", "-ra", "-p", "no:cacheprovider"]
    options += [
        "-p",
        "headway.testing.plugin",
        "--junitxml=report.xml",
        "-o",
        "junit_logging=all",
        "-o",
        "junit_duration_report=call",
    ]
    ended = subprocess.run(
        [
            *(_OWN_SHARED_MEMORY if _MAY_MOUNT else ()),
            sys.executable,
            "-P",
            "-m",
            "pytest",
            *options,
            *files,
        ],
        cwd=folder,
        env=os.environ
        | {"NOTEBOOK": str(notebook), "PYTEST_ADDOPTS": ""}  # reports as they are by default
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not _MAY_MOUNT:  # else /dev/shm has only what tests in other workers have just made
        for leaked in Path("/dev/shm").glob("headway-test-*"):
            leaked.unlink()  # by the test that leaks on purpose
    cases = {
        case.attrib["name"]: _case(case) for case in ElementTree.parse(folder / "report.xml").iter("testcase")
    }
    return Session(
        cases=cases,
        notebook=notebook,
        stdout=ended.stdout,
        exit_code=ended.returncode,
    )


def _case(element: ElementTree.Element) -> Case:
    result = next((child for child in element if child.tag in ("failure", "error", "skipped")), None)
    streams = [child.text or "" for child in element if child.tag.startswith("system-")]
    return Case(
        outcome="passed" if result is None else result.tag,
        text="" if result is None else result.text or result.attrib["message"],
        output="\n".join(streams),
        seconds=float(element.attrib["time"]),
    )


@pytest.fixture
def case(session: Session, request: pytest.FixtureRequest) -> Case:
    """The case that the test is named after."""
    return session.cases[request.node.name]


def test_all_fail_alike(session: Session, case: Case) -> None:
    assert case.outcome == "failure"
    assert "ranks 0-1 of 2: AssertionError" in case.text
    assert case.text.count("def test_all_fail_alike") == 1, "said once for all ranks"
    assert "Differing items:" in case.text, "assertions explain themselves"
    assert "{'eggs': [1, 2, 3]} != {'eggs': [1, 2, 4]}" in case.text
    assert "\nkitchen/test_failing.py:48: AssertionError" in case.text, (
        "the file as seen from where pytest was started"
    )
    assert "worker.py" not in case.text
    assert "Captured stdout of ranks 0-1" in session.stdout
    assert case.output.count("said by all") == 1


def test_skipped(session: Session, case: Case) -> None:
    assert case.outcome == "skipped"
    assert "no oven here" in case.text
    assert "SKIPPED [1] kitchen/test_failing.py:" in session.stdout, "blames the test, not the plugin"


def test_expected_to_fail(case: Case) -> None:
    assert case.outcome == "skipped"  # junit's word for it
    assert "known to be broken" in case.text


def test_marked_as_expected_to_fail(case: Case) -> None:
    assert case.outcome == "skipped"


def test_thread_dies(case: Case) -> None:
    assert case.outcome == "failure"
    assert "PytestUnhandledThreadExceptionWarning" in case.text
    assert "ValueError: invalid literal for int() with base 10: 'flour'" in case.text


def test_the_same_processes_serve_tests_that_end_alike(session: Session) -> None:
    assert len(set(session.pids("test_passes"))) == 2
    assert session.pids("test_passes") == session.pids("test_after_what_was_alike")


def test_each_in_its_own_way(case: Case) -> None:
    assert "rank 0 of 2: ValueError: cause 0" in case.text
    for rank in (0, 1):
        assert f"\nrank {rank}:\n" in case.text
        assert f"E       ValueError: cause {rank}" in case.text
        assert f"rank {rank} to stdout" in case.output
        assert f"rank {rank} to stderr" in case.output
    assert "def deeper(rank: int)" in case.text


def test_fresh_processes_when_ranks_end_differently(session: Session) -> None:
    assert not set(session.pids("test_passes")) & set(session.pids("test_after_what_was_not_alike"))


def test_fresh_processes_when_a_collective_was_left_open(session: Session) -> None:
    assert session.cases["test_collective_left_open"].outcome == "passed"
    assert session.cases["test_after_collective_left_open"].outcome == "passed"


def test_a_leak_may_be_allowed_but_harms_nobody_else(session: Session) -> None:
    assert session.cases["test_leak_that_is_allowed"].outcome == "passed"
    assert not set(session.pids("test_leak_that_is_allowed")) & set(session.pids("test_leaks_everything"))


@pytest.mark.parametrize(
    "leak",
    [
        "process ",
        "socket 127.0.0.1:",
        "forgotten.txt",
        "thread forgotten",
        "environment variable FORGOTTEN",
        "handler of SIGUSR2",
        "sys.stdout, which was replaced",
    ],
)
def test_leaks_are_named(session: Session, leak: str) -> None:
    text = session.cases["test_leaks_everything"].text
    assert "rank 1 of 2: left behind: process " in text
    assert f"  {leak}" in text or leak in text.partition("open file")[2]
    assert "rank 0" not in text, "that rank left nothing"
    assert "handler of SIGUSR1" not in text, "that one is as it was"


def test_leaks_shared_memory(case: Case) -> None:
    assert case.outcome == "failure"
    assert "shared memory /dev/shm/headway-test-" in case.text


def test_one_fails_and_the_others_wait_for_it(case: Case) -> None:
    assert "rank 2 of 4: ValueError: no more flour" in case.text
    assert "ranks 0-1, 3: still running 2 s after rank 2 had ended" in case.text, case.text
    assert "in barrier" in case.text, "and says where they were"
    assert "in test_one_fails_and_the_others_wait_for_it" in case.text
    assert "control.py" not in case.text, "headway's own threads are not the reader's business"
    assert case.seconds < 40, "does not sit out the timeout of 60 s"


def test_one_skips_and_the_other_waits_for_it(case: Case) -> None:
    assert case.outcome == "skipped"
    assert "not my task (on rank 1)" in case.text
    assert case.seconds < 40


def test_hangs(case: Case) -> None:
    assert "rank 1 of 3: did not end within 8 s" in case.text
    assert 'test_failing.py", line' in case.text
    assert "in test_hangs" in case.text
    assert "headway/testing" not in case.text
    assert "rank 2: did not end within 8 s: a signal had stopped it" in case.text
    assert "rank 0" not in case.text
    assert "before the hang" in case.output


def test_is_killed(session: Session, case: Case) -> None:
    assert "rank 1 of 2: was killed by SIGKILL" in case.text
    assert (
        "rank 0: ended, with exit code 1, because rank 1 was gone" in case.text
        or "rank 0: still at" in case.text
    )
    assert "before the end" in case.output
    assert case.seconds < 40
    memory = Path("/dev/shm", (session.notebook / "test_is_killed").read_text())
    assert not memory.exists(), "multiprocessing's helper had time to remove it"


def test_root_leaves_with_exit_code_0(case: Case) -> None:
    assert "rank 0 of 2: exited with code 0" in case.text


def test_crashes(case: Case) -> None:
    assert "rank 0 of 1: crashed in native code (SIGSEGV)" in case.text
    assert "in test_crashes" in case.text


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (record.format_pointer(0, {"rank": 3, "error": "ValueError: x"}, None), 3),
        (
            record.format_cause(
                {"kind": "vanished", "rank": 3, "host": "a", "pid": 1, "error": "died"}, 4, None
            ),
            3,
        ),
        (
            record.format_cause(
                {"kind": "vanished", "rank": 0, "host": "a", "pid": 1, "error": "died"}, 4, None
            ),
            None,
        ),
        ("headway: hello\nrank 3 of 4 on a train\n", None),
    ],
)
def test_last_words_tell_who_was_first(words: str, culprit: int | None) -> None:
    assert process.find_culprit(f"some output\n{words}", 0) == culprit


def test_a_rank_that_was_ended_for_no_reason_fails_the_test() -> None:
    nothing = {"stack": "", "stdout": "", "stderr": ""}
    passed = RankReport(outcome="passed", reason="", text="", collectives=0, reusable=True)
    results = [
        process.RankResult(rank=0, report=None, problem="ended because of rank 1", released=True, **nothing),
        process.RankResult(rank=1, report=passed, problem="", released=False, **nothing),
    ]
    with pytest.raises(pytest.fail.Exception, match="rank 0 of 2: ended because of rank 1"):
        runner._raise_outcome(results)


def test_leaves_the_others_alone(case: Case) -> None:
    assert case.outcome == "failure", "a rank that left in peace is no excuse for those that had to end"
    assert "rank 0" in case.text


def test_tests_go_on_after_all_that(session: Session) -> None:
    assert session.cases["test_after_all_that"].outcome == "passed"
    assert len(session.pids("test_after_all_that")) == 1


def test_wants_a_lock(case: Case) -> None:
    assert case.outcome == "failure"
    assert "fixture or parameter 'lock' cannot be sent to the ranks" in case.text
    assert "Traceback" not in case.text


@pytest.mark.parametrize("name", ["test_in_unittest", "test_async"])
def test_what_would_run_without_ranks_is_refused(session: Session, name: str) -> None:
    case = session.cases[name]
    assert case.outcome == "error"
    assert "@ranks works on plain" in case.text


def test_a_file_that_a_rank_cannot_import(session: Session) -> None:
    case = session.cases["test_never_runs"]
    assert "rank 0 of 1: RuntimeError: this file does not like ranks" in case.text
    assert "body.py" not in case.text


def test_exit_in_a_rank_ends_the_session(session: Session) -> None:
    assert "test_never_run" not in session.cases
    assert "enough" in session.stdout
    assert session.exit_code == pytest.ExitCode.INTERRUPTED
