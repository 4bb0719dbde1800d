"""Shards and images that were made to hurt, or that change under us: bounded, counted, named, and nothing runs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from headway.data import Shard, pack
from headway.data.shards import members, walk
from headway.errors import BadShard


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def peak_megabytes(code: str, *args: object) -> float:
    """How much memory a fresh process took at most for some lines, beyond what importing takes."""
    script = f"""
import resource, sys
from pathlib import Path
from headway.data.shards import Shard, Limits, walk
from headway.data.decode import decode
from headway.errors import BadShard, BadSample
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
{code}
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


# --- a shard that changes in use


def big(folder: Path, samples: int = 8, size: int = 300_000) -> Path:
    (path,) = pack(({"__key__": f"{n:03d}", "bin": bytes([n]) * size} for n in range(samples)), folder)
    return path


def test_a_shard_cut_off_in_use_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    path = big(tmp_path)
    code = """
shard = Shard.open(Path(sys.argv[1]))
assert len(shard[7]["bin"]) == 300_000
import os; os.truncate(sys.argv[1], 1000)
try:
    shard[7]["bin"].tobytes()
except BadShard as error:
    assert "ends at byte" in str(error) and sys.argv[1] in str(error), error
else:
    raise SystemExit("no error")
"""
    peak_megabytes(code, path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_rewritten_in_use_never_gives_wrong_bytes(indexed: bool, tmp_path: Path) -> None:
    """Written over in place, so that an open file sees it: other sizes, so other headers."""
    path = big(tmp_path / "one")
    if not indexed:
        path.with_suffix(".idx").unlink()
    (other,) = pack(
        ({"__key__": f"{n:03d}", "bin": bytes([9]) * 300_000} for n in range(8)), tmp_path / "two"
    )
    shifted = header("x.bin", 5000) + bytes(5120) + other.read_bytes()
    shard = Shard.open(path)
    with path.open("r+b") as file:
        file.write(shifted[: path.stat().st_size])
    with pytest.raises(BadShard, match=r"does not belong|rewritten|no tar header"):
        _ = shard[3]


def test_a_shard_replaced_by_rename_is_read_to_its_end(tmp_path: Path) -> None:
    path = big(tmp_path / "one")
    (other,) = pack([{"__key__": "x", "bin": b"other"}], tmp_path / "two")
    shard = Shard.open(path)
    other.replace(path)
    assert all(bytes(shard[n]["bin"]) == bytes([n]) * 300_000 for n in range(8))


def test_a_pipe_or_folder_in_the_place_of_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    (tmp_path / "y.tar").mkdir()
    for name in ("x.tar", "y.tar"):
        with pytest.raises(BadShard, match="is not a file"):
            Shard.open(tmp_path / name)


def test_open_shards_hold_one_file_each_and_close_it(tmp_path: Path) -> None:
    path = big(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting only
    shards = [Shard.open(path) for _ in range(5)]
    view = shards[0][0]["bin"]
    assert len(os.listdir("/proc/self/fd")) == before + 5  # noqa: PTH208
    del shards
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert view[0] == 0 and len(view) == 300_000, "what was read stays"


def test_many_threads_read_one_shard(tmp_path: Path) -> None:
    shard, wrong = Shard.open(big(tmp_path)), []

    def read(seed: int) -> None:
        for n in range(40):
            number = (n * 7 + seed) % 8
            if bytes(shard[number]["bin"]) != bytes([number]) * 300_000:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- archives


def test_two_sizes_for_one_file_are_refused() -> None:
    """Some readers believe the header and some the PAX record: one sees files that the other does not."""
    record = b"14 size=1024\n"
    record = b"%d size=1024\n" % len(record)
    data = header("p", len(record), tarfile.XHDTYPE) + record + bytes(512 - len(record))
    data += header("a.bin", 512) + bytes(1024) + bytes(1024)
    with pytest.raises(BadShard, match="two sizes, 512 and 1024"):
        list(members(data, "x"))


def test_a_million_pax_records_are_read_in_one_pass() -> None:
    record = b"6 a=b\n" * 170_000
    data = header("p", len(record), tarfile.XHDTYPE) + record + bytes(-len(record) % 512)
    data += header("a.bin", 0) + bytes(1024)
    began = os.times().user
    assert [m.name for m in members(data, "x")] == ["a.bin"]
    assert os.times().user - began < 5, "seconds of this process; copying the rest for each record took 20"


def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info.name, info.size = b"\xff\xfe.bin".decode("utf-8", "surrogateescape"), 3
        archive.addfile(info, io.BytesIO(b"abc"))
    shard = Shard.open(tmp_path / "x.tar")
    assert shard.entries[0].key.encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert bytes(shard[0]["bin"]) == b"abc"


def test_a_million_files_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    one = b"".join(header(f"{n:06d}.bin", 0) for n in range(1000))
    with path.open("wb") as file:
        for _ in range(200):
            file.write(one)
        file.write(bytes(1024))
    taken = peak_megabytes("assert len(walk(Path(sys.argv[1]))) == 200_000", path)
    assert taken < 60, "megabytes for 200,000 samples; as objects they took 150"


def test_an_index_that_never_ends_takes_little_memory(tmp_path: Path) -> None:
    path = big(tmp_path)
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"v1.2 9\n")
        file.truncate(300_000_000)  # one line of zeros
    code = """
try:
    Shard.open(Path(sys.argv[1]))
except BadShard as error:
    assert "does not belong" in str(error)
else:
    raise SystemExit("no error")
"""
    assert peak_megabytes(code, path) < 50
    path.with_suffix(".idx").unlink()
    with path.with_name(path.name + ".idx").open("wb") as file:
        file.truncate(300_000_000)
    assert peak_megabytes(code.replace("does not belong", "not an index"), path) < 50


def test_names_that_lead_outside_are_only_names(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(header("../../etc/a.txt", 0) + header("/b.txt", 0) + bytes(1024))
    assert [entry.key for entry in walk(path)] == ["../../etc/a", "/b"]
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]
