from __future__ import annotations

import errno
import json
import math
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import RunLocked, StorageError
from headway.system import jsonlines
from headway.system.jsonlines import JsonLinesWriter, Tail
from headway.system.log import install_handler


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_rows_are_appended_and_read(file: Path) -> None:
    with JsonLinesWriter(file) as rows:
        rows.write({"step": 1})
        rows.write_all([{"step": 2, "name": "ä\n"}, {"step": 3}])
        rows.write_all([])
    with JsonLinesWriter(file) as rows:
        rows.write({"step": 4})
        assert rows.lost == 0
    assert [row["step"] for row in jsonlines.read(file)] == [1, 2, 3, 4]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_numbers_that_json_does_not_have_are_words(file: Path) -> None:
    with JsonLinesWriter(file) as rows:
        rows.write({"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}]})
    assert list(jsonlines.read(file)) == [{"a": "nan", "b": ["inf", {"c": ["-inf", 1.5]}]}]


def test_what_json_cannot_represent_is_an_error_unless_there_is_a_default(file: Path) -> None:
    with JsonLinesWriter(file) as rows, pytest.raises(TypeError):
        rows.write({"path": file})
    with JsonLinesWriter(file, default=str) as rows:
        rows.write({"path": file})
    assert list(jsonlines.read(file)) == [{"path": str(file)}]


def test_a_line_that_a_killed_writer_left_costs_only_itself(file: Path) -> None:
    file.write_bytes(b'{"step": 1}\n{"step": 2, "metr')
    with JsonLinesWriter(file) as rows:
        rows.write({"step": 3})
        rows.write({"step": 4})
    assert [row["step"] for row in jsonlines.read(file)] == [1, 3, 4]
    assert b"\n\n" not in file.read_bytes()


def test_no_writer_begins_with_a_blank_line(file: Path) -> None:
    for number in range(3):  # attempts, one after the other
        with JsonLinesWriter(file) as writer:
            writer.write({"n": number})
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [0, 1, 2]


def test_readers_skip_what_is_not_an_object(file: Path) -> None:
    file.write_bytes(b'7\n\n[1]\n{"step": 1}\n\xff\xfe\n{"step": 2}\n{"st')
    assert list(jsonlines.read(file)) == [{"step": 1}, {"step": 2}]
    assert list(jsonlines.read_reversed(file)) == [{"step": 2}, {"step": 1}]


def test_the_last_rows_are_read_from_the_end(file: Path) -> None:
    with JsonLinesWriter(file) as rows:
        rows.write_all({"step": step, "text": "x" * 100} for step in range(1000))
    newest = [row["step"] for row in jsonlines.read_reversed(file, limit_bytes=1000)]
    assert newest[:3] == [999, 998, 997] and len(newest) < 10
    assert list(jsonlines.read_reversed(file.with_name("missing"))) == []


def test_a_full_disk_costs_rows_which_are_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.write
    rows = JsonLinesWriter(file, content="metric rows")
    rows.write({"step": 1})

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    rows.write({"step": 2})
    rows.write_all([{"step": 3}, {"step": 4}])
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    rows.write({"step": 5})
    monkeypatch.setattr(os, "write", real)
    rows.write({"step": 6})
    rows.close()
    rows.close()
    assert rows.lost == 4 and rows.error == ""
    assert [row["step"] for row in jsonlines.read(file)] == [1, 6], (
        "the torn line does not spoil the next one"
    )
    (warning,) = caplog.messages
    assert warning == f"metric rows are being lost: {file}: No space left on device"


def test_a_disk_that_is_full_when_the_file_is_closed_costs_rows_only(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps lines in memory, and says only then that they exceed the quota."""
    real = os.close
    rows = JsonLinesWriter(file, content="metric rows")
    rows.write({"step": 1})

    def full(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", full)
    rows.close()
    rows.close()
    monkeypatch.setattr(os, "close", real)
    (warning,) = caplog.messages
    assert warning == f"metric rows may be lost: {file}: {os.strerror(errno.EDQUOT)}"


def test_rows_of_a_run_whose_owner_cannot_be_read_are_lost(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may not be written, and training does not end; it ends if another process has the run."""
    problems: list[StorageError] = []

    def check() -> None:
        if problems:
            raise problems.pop()

    with JsonLinesWriter(file, content="metric rows", before_write=check) as rows:
        problems.append(StorageError("Input/output error"))
        rows.write_all([{"step": 1}, {"step": 2}])
        rows.write({"step": 3})
        problems.append(RunLocked("taken over"))
        with pytest.raises(RunLocked):
            rows.write({"step": 4})
    assert rows.lost == 2 and [row["step"] for row in jsonlines.read(file)] == [3]
    assert caplog.messages == [f"metric rows are being lost: {file}: Input/output error"]


def test_a_device_that_is_full_costs_rows_and_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    install_handler()
    with JsonLinesWriter(Path("/dev/full")) as rows:
        rows.write({"step": 1})
        rows.write({"step": 2})
    assert rows.lost == 2
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_real_limit_costs_rows_too(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from headway.system.jsonlines import JsonLinesWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "with JsonLinesWriter(Path(sys.argv[1])) as rows:\n"
        "    for step in range(100):\n"
        "        rows.write({'step': step})\n"
        "    print(rows.lost)\n"
    )
    file = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    whole = list(jsonlines.read(file))
    assert file.stat().st_size <= 1000 and len(whole) + int(done.stdout) == 100


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not open"):
        JsonLinesWriter(tmp_path / "missing" / "rows.jsonl")


def test_a_tail_reads_each_row_once_and_waits_for_whole_lines(file: Path) -> None:
    tail = Tail(file)
    assert tail.read() == []
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert tail.read() == [{"step": 1}, {"step": 2}]
    assert tail.read() == []
    with file.open("ab") as more:
        more.write(b'ep": 3}\nnot json\n{"step": 4}\n')
    assert tail.read() == [{"step": 3}, {"step": 4}]
    assert tail.offset == file.stat().st_size
    assert Tail(file, offset=12).read()[0] == {"step": 2}, "continues where another one stopped"


def test_a_tail_goes_on_after_a_line_that_is_too_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlines, "_LONGEST_BYTES", 1000)
    file.write_bytes(b"x" * 5000 + b'\n{"step": 1}\n')
    tail = Tail(file)
    assert [row for _ in range(6) for row in tail.read(most_bytes=100)] == [{"step": 1}]


def test_a_tail_reads_a_large_file_in_parts_and_rows_longer_than_a_part(file: Path) -> None:
    long = {"step": 1, "text": "x" * 5000}
    file.write_text("".join(json.dumps(row) + "\n" for row in (long, {"step": 2}, long, {"step": 3})))
    tail, parts = Tail(file), []
    while rows := tail.read(most_bytes=1000):
        parts.append([row["step"] for row in rows])
    assert [step for part in parts for step in part] == [1, 2, 1, 3] and len(parts) > 1


def test_the_last_time_before_a_time_is_that_of_a_search_through_all_rows(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonlines, "_LAST_BYTES", 64)  # so that short files are bisected
    draw = random.Random(7)
    for count in (0, 1, 2, 7, 40, 200):
        times, lines = [], []
        for number in range(count):
            times.append(100.0 + number // 2)
            lines.append(json.dumps({"time": times[-1], "text": "x" * draw.choice((0, 5, 50, 500))}))
            lines += draw.choice(([], [], ['{"time": 1'], ["", "{}"]))  # torn lines, and rows without a time
        file.write_text("".join(f"{line}\n" for line in lines))
        for before in (99.0, 100.0, 100.5, 101.0, 119.5, 150.0, math.inf):
            expected = max((each for each in times if each < before), default=None)
            assert jsonlines.last_time(file, before=before) == expected, (count, before)
    assert jsonlines.last_time(file.with_name("none"), before=math.inf) is None


@pytest.mark.parametrize(
    ("value", "number", "time", "count"),
    [
        (0, True, True, True),
        (7, True, True, True),
        (7.5, True, True, False),
        (-1, True, False, False),
        (10**10, True, False, True),
        (10**16, False, False, False),
        (-1e16, False, False, False),
        (math.inf, False, False, False),
        (math.nan, False, False, False),
        (True, False, False, False),
        ("7", False, False, False),
        (None, False, False, False),
    ],
)
def test_values_of_a_file_are_numbers_times_or_counts(
    value: object, *, number: bool, time: bool, count: bool
) -> None:
    found = jsonlines.is_number(value), jsonlines.is_time(value), jsonlines.is_count(value)
    assert found == (number, time, count)
