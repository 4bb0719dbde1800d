"""Rank logs: everything arrives in the file, the terminal is as before, and nothing stays behind."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from headway.errors import StorageError
from headway.record.rank_logs import rank_log
from headway.run import Run

Program = Callable[..., "subprocess.CompletedProcess[str]"]
Lines = Callable[..., list[str]]


def descriptors() -> dict[str, str]:
    """The open files of this process; the one that lists them is gone when it is looked at."""
    return {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


# --- what arrives


def test_root_writes_both(program: Program, lines: Lines) -> None:
    done = program("with rank_log(run, rank=0, attempt=1): print('out'); print('err', file=sys.stderr)")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert lines() == ["out", "err"]


def test_other_ranks_write_the_file_only_whatever_writes(program: Program, lines: Lines) -> None:
    done = program("""
import ctypes, subprocess, warnings
libc = ctypes.CDLL(None)
print('before')
with rank_log(run, rank=3, attempt=1) as log:
    print('python')
    libc.printf(b'c library\\n')
    warnings.warn('careful')
    os.write(1, b'descriptor\\n')
    subprocess.run(['sh', '-c', 'echo child; echo child error >&2'], check=True)
    sys.stdout.buffer.write(b'binary\\n')
    os.write(log.original_stderr_fd, b'to the terminal\\n')
    libc.printf(b'c library, still buffered\\n')
print('after')
""")
    assert (done.stdout, done.stderr) == ("before\nafter\n", "to the terminal\n")
    written = lines(3)
    for line in (
        "python",
        "c library",
        "descriptor",
        "child",
        "child error",
        "binary",
        "c library, still buffered",
    ):
        assert written.count(line) == 1
    assert any("UserWarning: careful" in line for line in written)


def test_attempts_follow_each_other_in_one_file(run: Run, program: Program) -> None:
    program("with rank_log(run, rank=2, attempt=1): print('first')")
    with run.log_file(2).open("a") as file:
        file.write("torn")
    program("with rank_log(run, rank=2, attempt=2): print('second')")
    text = run.log_file(2).read_text()
    assert re.fullmatch(
        r"--- attempt 1  \S+Z  rank 2  host \S+  pid \d+ ---\nfirst\ntorn\n"
        r"--- attempt 2  \S+Z  rank 2  host \S+  pid \d+ ---\nsecond\n",
        text,
    )
    assert run.log_file(2).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("rank", [0, 1])
def test_complete_lines_survive_a_hard_exit(program: Program, lines: Lines, rank: int) -> None:
    done = program(f"""
with rank_log(run, rank={rank}, attempt=1):
    print('last words')
    print('more on stderr', file=sys.stderr)
    os._exit(7)
""")
    assert done.returncode == 7
    assert lines(rank) == ["last words", "more on stderr"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_signal_kills_has_said_what_it_said(program: Program, lines: Lines, rank: int) -> None:
    done = program(f"""
with rank_log(run, rank={rank}, attempt=1):
    print('alive'); os.kill(os.getpid(), {signal.SIGKILL.value})
""")
    assert done.returncode == -signal.SIGKILL
    assert lines(rank) == ["alive"]


def test_odd_text(program: Program, lines: Lines) -> None:
    done = program(
        """
with rank_log(run, rank=0, attempt=1):
    print('grüße 🚀')
    print('x' * 3_000_000)
    sys.stdout.flush()
    for piece in ('split é'.encode()[:-1], 'é'.encode()[-1:] + b' \\xff\\x00\\n'):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    try:
        print('surrogate \\udcff')
    except UnicodeEncodeError:
        print('refused')
    print('surrogate \\udcff', file=sys.stderr)
""",
        PYTHONIOENCODING="utf-8:strict",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[3] == "refused", "the terminal behaves as it would without us"
    written = lines()
    assert written[0] == "grüße 🚀"
    assert written[1] == "x" * 3_000_000
    assert written[2] == "split é \\xff"
    assert written[3:] == ["surrogate \\udcffrefused", "surrogate \\udcff"], (
        "the file takes what the terminal refuses"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_ends_the_log_with_its_traceback(program: Program, lines: Lines, rank: int) -> None:
    done = program(f"""
with rank_log(run, rank={rank}, attempt=1):
    print('half a line', end='')
    raise ValueError('loss is \\x1b[31mnan')
""")
    assert done.stderr.count("ValueError: loss is") == 1, "the interpreter prints it on the terminal, once"
    written = lines(rank)
    assert written[0] == "half a line"
    assert written[-1] == "ValueError: loss is nan"
    assert sum(line.startswith("ValueError") for line in written) == 1


def test_secrets_are_not_written(program: Program, run: Run) -> None:
    done = program(
        "with rank_log(run, rank=0, attempt=1): print(os.environ['WANDB_API_KEY'], 'https://me:hunter22@host/')",
        WANDB_API_KEY="canary-0123456789",
    )
    assert "canary-0123456789" in done.stdout, "the terminal is the user's own"
    assert "canary" not in run.log_file(0).read_text()
    assert "hunter22" not in run.log_file(0).read_text()


# --- children and threads


@pytest.mark.parametrize("rank", [0, 1])
def test_forked_workers_share_the_log(program: Program, lines: Lines, rank: int) -> None:
    done = program(f"""
import multiprocessing, threading
def work(number):
    for line in range(50):
        print(f'worker {{number}} line {{line}} ' + 'x' * 100)
with rank_log(run, rank={rank}, attempt=1):
    print('unfinished ', end='')
    fork = multiprocessing.get_context('fork')
    processes = [fork.Process(target=work, args=(i,)) for i in range(4)]
    for process in processes: process.start()
    for process in processes: process.join()
    print('and finished')
""")
    assert done.returncode == 0, done.stderr
    written = lines(rank)
    assert written.count("unfinished and finished") == 1
    expected = {f"worker {n} line {k} " + "x" * 100 for n in range(4) for k in range(50)}
    assert len(written) == 201
    assert set(written) == expected | {"unfinished and finished"}


def test_a_fork_while_another_thread_prints_does_not_hang(program: Program, lines: Lines) -> None:
    done = program("""
import threading, warnings
warnings.simplefilter('ignore', DeprecationWarning)  # of the fork, in newer versions of Python
stop = threading.Event()
def chatter():
    while not stop.is_set(): print('chatter', file=sys.stderr)
with rank_log(run, rank=1, attempt=1):
    thread = threading.Thread(target=chatter); thread.start()
    for number in range(100):
        if (pid := os.fork()) == 0:
            print('child', number); os._exit(0)
        os.waitpid(pid, 0)
    stop.set(); thread.join()
""")
    assert done.returncode == 0, done.stderr
    assert {line for line in lines(1) if "chatter" not in line} == {f"child {n}" for n in range(100)}


def test_a_signal_handler_may_print(program: Program, lines: Lines) -> None:
    done = program("""
import signal
signal.signal(signal.SIGALRM, lambda *_: print('alarm', file=sys.stderr))
with rank_log(run, rank=1, attempt=1):
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for number in range(3000): print('line', number, file=sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print('end')
""")
    assert done.returncode == 0, done.stderr
    assert lines(1)[-1] == "end"
    assert "alarm" in "".join(lines(1))


def test_threads_do_not_mix_their_lines(program: Program, lines: Lines) -> None:
    program("""
import threading
def work(n):
    for _ in range(200): sys.stdout.write(f'{n}' * 50 + '\\n')
with rank_log(run, rank=1, attempt=1):
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
""")
    assert sorted(lines(1)) == sorted([str(n) * 50 for n in range(4)] * 200)


def test_data_loader_workers(program: Program, lines: Lines) -> None:
    done = program("""
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        print('item', i); return i
with rank_log(run, rank=0, attempt=1):
    print('main')
    list(DataLoader(Data(), num_workers=2, multiprocessing_context='fork'))
""")
    assert done.returncode == 0, done.stderr
    expected = ["item 0", "item 1", "item 2", "item 3", "main"]
    assert sorted(lines()) == expected
    assert sorted(done.stdout.splitlines()) == expected


# --- in the terminal's place


def test_streams_stay_what_they_were(run: Run) -> None:
    raw = io.BytesIO()
    original = io.TextIOWrapper(raw, encoding="latin-1", errors="replace", line_buffering=True)
    with redirect_stdout(original), rank_log(run, rank=0, attempt=1):
        stream = sys.stdout
        assert stream is not original
        assert (stream.encoding, stream.errors, stream.isatty()) == ("latin-1", "replace", False)
        assert stream.line_buffering and stream.writable() and not stream.closed
        assert stream.write("four") == 4
        assert stream.buffer.write(b"four") == 4
        stream.writelines(["a\n", "b\n"])
        stream.reconfigure(encoding="utf-8")
        assert original.encoding == "utf-8"
        with pytest.raises(TypeError):
            stream.write(b"bytes")  # type: ignore[arg-type]
        with pytest.raises(io.UnsupportedOperation):
            stream.fileno()
    original.flush()
    assert raw.getvalue() in (b"fourfoura\nb\n",)


def test_file_numbers_are_those_of_the_console(program: Program) -> None:
    done = program("""
for rank in (0, 1):
    with rank_log(run, rank=rank, attempt=1) as log:
        facts = f'{sys.stdout.fileno()} {sys.stderr.fileno()} {sys.stdout.isatty()}\\n'
        os.write(log.original_stderr_fd, facts.encode())
""")
    assert done.stderr == "1 2 False\n1 2 False\n"


def test_a_stream_without_a_binary_side(run: Run, lines: Lines) -> None:
    notebook = io.StringIO()
    with redirect_stdout(notebook), rank_log(run, rank=0, attempt=1):
        print("cell")
        assert getattr(sys.stdout, "buffer", None) is None
    assert notebook.getvalue() == "cell\n"
    assert lines() == ["cell"]


def test_a_program_without_a_console(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with rank_log(run, rank=0, attempt=1):
        assert sys.stdout is None
    assert sys.stdout is None


def test_log_handlers_made_before_are_recorded_and_given_back(run: Run, lines: Lines) -> None:
    early = logging.StreamHandler()
    logger = logging.getLogger("headway.test.early")
    logger.addHandler(early)
    before = early.stream
    try:
        with rank_log(run, rank=0, attempt=1):
            logger.warning("through an early handler")
            late = logging.StreamHandler()
            logger.addHandler(late)
        assert early.stream is before
        assert late.stream is before
        logger.warning("afterwards")
    finally:
        logger.handlers.clear()
    assert lines() == ["through an early handler"]


# --- nothing stays installed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left(run: Run, rank: int, error: type[BaseException] | None) -> None:
    streams, before = (sys.stdout, sys.stderr), descriptors()
    status = [os.fstat(fd) for fd in (1, 2)]
    try:
        with rank_log(run, rank=rank, attempt=1):
            assert sys.stdout is not streams[0]
            if error is not None:
                raise error("stop")
    except BaseException as caught:  # noqa: BLE001 - each kind of ending is meant
        assert type(caught) is error
    assert (sys.stdout, sys.stderr) == streams
    assert sys.stdout is streams[0] and sys.stderr is streams[1]
    assert descriptors() == before
    assert [os.fstat(fd)[:3] for fd in (1, 2)] == [each[:3] for each in status]


@pytest.mark.parametrize(("outer", "inner"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_nested(run: Run, tmp_path: Path, outer: int, inner: int) -> None:
    other = Run.create(tmp_path / "other", name="other")
    streams, before = (sys.stdout, sys.stderr), descriptors()
    with rank_log(run, rank=outer, attempt=1):
        print("outside")
        with rank_log(other, rank=inner, attempt=1):
            print("inside")
        print("outside again")
    assert sys.stdout is streams[0] and sys.stderr is streams[1]
    assert descriptors() == before
    inside = other.log_file(inner).read_text().splitlines()[1:]
    outside = run.log_file(outer).read_text().splitlines()[1:]
    assert inside == ["inside"]
    assert outside == (["outside", "inside", "outside again"] if inner == 0 else ["outside", "outside again"])


def test_again_after_the_end(run: Run, lines: Lines) -> None:
    for attempt in (1, 2):
        with rank_log(run, rank=0, attempt=attempt):
            print("attempt", attempt)
    assert lines() == ["attempt 1", "attempt 2"]


def test_a_stream_that_was_kept_only_passes_on(program: Program, lines: Lines) -> None:
    done = program("""
for rank in (0, 1):
    with rank_log(run, rank=rank, attempt=1) as log:
        kept, buffer = sys.stderr, sys.stderr.buffer
    print('later', file=kept)
    buffer.write(b'bytes\\n'); buffer.flush()
    assert not log.lost
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "later\nbytes\n" * 2
    assert lines(0) == lines(1) == []


def test_somebody_elses_wrapper_is_left_alone(run: Run) -> None:
    original, theirs = sys.stdout, io.StringIO()
    try:
        with rank_log(run, rank=0, attempt=1):
            sys.stdout = theirs
        assert sys.stdout is theirs
    finally:
        sys.stdout = original


# --- storage that fails


def test_a_log_is_never_written_through_a_link(run: Run, tmp_path: Path) -> None:
    run.log_file(1).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"rank-00001\.txt"), rank_log(run, rank=1, attempt=1):
        raise AssertionError("not reached")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_up(program: Program, run: Run, rank: int) -> None:
    done = program(f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with rank_log(run, rank={rank}, attempt=1) as log:
    size = os.fstat(log.file.descriptor).st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, resource.RLIM_INFINITY))
    for number in range(100): print(f'line {{number:05d}}', file=sys.stderr)
    lost = log.lost
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print('space again', file=sys.stderr)
print(lost)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n", "1000 bytes hold 90 lines of 11"
    assert done.stderr.count("cannot be written") == 1
    text = run.log_file(rank).read_text().splitlines()[1:]
    assert text[:90] == [f"line {number:05d}" for number in range(90)]
    assert text[91:] == ["--- 10 lines are missing here ---", "space again"]


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_is_gone_does_not_end_the_run(program: Program, lines: Lines, flush: bool) -> None:
    """As after a kill of slurmstepd, or of the terminal: the log has what was printed."""
    done = program(f"""
kept = os.dup(2)
for descriptor in (1, 2):
    read, write = os.pipe()
    os.dup2(write, descriptor)
    os.close(read), os.close(write)
with rank_log(run, rank=0, attempt=1):
    print('first', flush={flush})
    print('second', flush={flush})
    print('third', file=sys.stderr, flush={flush})
    sys.stdout.flush()
print('after the run')
sys.stdout.flush()
os.write(kept, b'the end')
""")
    assert (done.returncode, done.stderr) == (0, "the end")
    assert [line for line in lines() if "reader of the output" not in line] == ["first", "second", "third"]


def test_a_log_that_is_deleted_under_us(program: Program) -> None:
    done = program("""
with rank_log(run, rank=1, attempt=1) as log:
    log.path.unlink(); print('on it goes')
print('done')
""")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_no_room_to_log_in(run: Run) -> None:
    before = descriptors()
    run.log_file(1).mkdir()
    with pytest.raises(StorageError), rank_log(run, rank=1, attempt=1):
        raise AssertionError("not reached")
    assert descriptors() == before
