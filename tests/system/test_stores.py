"""Stores: the interface, proved by the stores that headway has and by one that uses nothing but the interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.data import Shard, pack
from headway.data.shards.tar import members
from headway.errors import StorageError, UsageError
from headway.system.stores import HttpStore, LocalStore, ObjectInfo, Store, Upload, check_key

DATA = bytes(range(256)) * 8


class MemoryUpload(Upload):
    def __init__(self, objects: dict[str, bytes], key: str) -> None:
        self._objects, self._key, self._data = objects, key, b""

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def commit(self) -> bool:
        self.created = self._objects.setdefault(self._key, self._data) is self._data
        return self.created

    def abort(self) -> None:
        self._data = b""


class MemoryStore(Store):
    """A store in the memory of this process: what a new implementation has to write."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from (self.head(key) for key in sorted(self._objects) if key.startswith(prefix))

    def head(self, key: str) -> ObjectInfo:
        if key not in self._objects:
            raise FileNotFoundError(key)
        return ObjectInfo(key=key, size=len(self._objects[key]), version="1")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.head(key)
        return self._objects[key][start:stop]

    def put(self, key: str) -> Upload:
        return MemoryUpload(self._objects, check_key(key))


class RangeServer(ThreadingHTTPServer):
    """Serves files with ranges, as a web server does; `troubles` are what it does instead, one per request."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), RangeHandler)
        self.root, self.ranges = root, True
        self.troubles: list[int | str] = []
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class RangeHandler(BaseHTTPRequestHandler):
    server: RangeServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        trouble = self.server.troubles.pop(0) if self.server.troubles else None
        path = self.server.root / self.path.lstrip("/").replace("%20", " ")
        if trouble == "hang up":
            self.close_connection = True
            return
        if isinstance(trouble, int) or not path.is_file():
            self.send_error(trouble if isinstance(trouble, int) else 404)
            return
        data, size = path.read_bytes(), path.stat().st_size
        wanted = self.headers.get("Range") if self.server.ranges else None
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if int(first) >= size:
                self.send_error(416)
                return
            data = data[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"seven"')
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if trouble == "cut off" else data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "www").mkdir()
    with RangeServer(tmp_path / "www") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=["local", "http", "http without ranges", "memory"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Three objects, put into a store through the interface alone."""
    kind: str = request.param
    server = request.getfixturevalue("server") if kind.startswith("http") else None
    store: Store = MemoryStore() if kind == "memory" else LocalStore(server.root if server else tmp_path)
    for key in ("train/b.tar", "train/a b.tar", "val.tar"):
        with store.put(key) as upload:
            upload.write(DATA[:100])
            upload.write(memoryview(DATA)[100:])
        assert upload.created
    if server is None:
        return store
    server.ranges = kind == "http"
    (server.root / "keys").write_text("val.tar\ntrain/b.tar\n")
    return HttpStore(server.url, index="keys", backoff_s=0.001)


def test_objects_are_found_and_read(filled: Store) -> None:
    keys = [info.key for info in filled.list()]
    assert keys == sorted(keys) and {"train/b.tar", "val.tar"} <= set(keys)
    assert [info.key for info in filled.list("train/b")] == ["train/b.tar"]
    assert filled.get("train/a b.tar") == DATA
    info = filled.head("val.tar")
    assert (info.key, info.size) == ("val.tar", len(DATA)) and info.version
    assert filled.head("val.tar") == info


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, None), (0, 1), (5, 10), (7, None), (5, 5), (2000, 9999), (2048, 3000), (9999, None)],
)
def test_ranges(filled: Store, start: int, stop: int | None) -> None:
    assert filled.get("val.tar", start, stop) == DATA[start:stop]


def test_a_key_that_does_not_exist(filled: Store) -> None:
    with pytest.raises(FileNotFoundError):
        filled.head("test.tar")
    with pytest.raises(FileNotFoundError):
        filled.get("test.tar", 3, 5)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../secret", "a//b", "a/./b", "a/..", "a\\b", "a\nb"])
def test_a_key_cannot_lead_out_of_its_store(key: str, tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path), HttpStore("http://127.0.0.1:9")):
        with pytest.raises(UsageError, match="is not a valid key"):
            store.get(key)


@pytest.mark.parametrize("make", [lambda path: LocalStore(path), lambda _: MemoryStore()])
def test_an_object_is_written_once_and_seen_when_it_is_whole(make: type[LocalStore], tmp_path: Path) -> None:
    store: Store = make(tmp_path)
    upload = store.put("a/b")
    upload.write(b"first")
    assert list(store.list()) == [], "not committed yet"
    with store.put("a/b") as other:
        other.write(b"second")
    assert other.created and upload.created is None
    assert not upload.commit() and upload.created is False
    upload.abort()
    assert store.get("a/b") == b"second"
    with pytest.raises(ZeroDivisionError), store.put("c") as broken:
        broken.write(b"half")
        raise ZeroDivisionError
    store.put("d").abort()
    assert [info.key for info in store.list()] == ["a/b"]


def test_nothing_is_left_of_an_aborted_upload(tmp_path: Path) -> None:
    with LocalStore(tmp_path).put("a") as upload:
        upload.write(b"whole")
    LocalStore(tmp_path).put("b").abort()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_that_fails_is_a_storage_error(tmp_path: Path) -> None:
    """Only a key that does not exist is a `FileNotFoundError`, on which callers decide."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "directory").mkdir()
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match=r"could not read .*loop: Too many levels of symbolic links"):
        store.head("loop")
    for key in ("loop", "directory"):
        with pytest.raises(StorageError, match=f"could not read .*{key}"):
            store.get(key)


def test_a_read_only_store_refuses_to_write(server: RangeServer) -> None:
    with pytest.raises(UsageError, match=r"is read-only: a\.tar cannot be written"):
        HttpStore(server.url).put("a.tar")


@pytest.mark.parametrize("trouble", ["hang up", "cut off", 503, 429, 500])
def test_a_request_that_fails_is_repeated(server: RangeServer, trouble: int | str) -> None:
    (server.root / "a.tar").write_bytes(DATA)
    store = HttpStore(server.url, backoff_s=0.001)
    server.troubles = [trouble] * 3
    assert store.get("a.tar", 10, 90) == DATA[10:90]
    assert len(server.requests) == 4
    server.troubles, server.ranges = [trouble] * 3, False
    assert store.get("a.tar", 10, 90) == DATA[10:90]


def test_a_server_that_stays_broken_is_a_storage_error(server: RangeServer) -> None:
    (server.root / "a.tar").write_bytes(DATA)
    store = HttpStore(server.url, retries=2, backoff_s=0.001)
    server.troubles = [503] * 9
    with pytest.raises(StorageError, match=r"could not read http://127.*/a\.tar: HTTP status 503"):
        store.get("a.tar")
    assert len(server.requests) == 3
    server.troubles = [403] * 9
    with pytest.raises(StorageError, match="HTTP status 403"):
        store.get("a.tar")
    assert len(server.requests) == 4, "what a server refuses is not asked for again"


def test_nobody_answers() -> None:
    with pytest.raises(StorageError, match="check the address and the network"):
        HttpStore("http://127.0.0.1:9", retries=1, backoff_s=0.001).get("a.tar")


def test_an_address_must_be_http_and_passwords_are_not_shown() -> None:
    with pytest.raises(UsageError, match="begins with http"):
        HttpStore("file:///etc")
    assert str(HttpStore("https://me:hunter2@example.org/x/")) == "https://[redacted]@example.org/x"


def test_a_store_without_an_index_cannot_be_listed(server: RangeServer) -> None:
    with pytest.raises(UsageError, match="cannot be listed"):
        list(HttpStore(server.url).list())


class StoredFile:
    """An object of a store in the shape that the reader of tar headers takes."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._size = store, key, store.head(key).size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        return self._store.get(self._key, start, max(start, stop))


def test_the_samples_of_a_shard_are_read_by_ranges(server: RangeServer) -> None:
    """The bytes of a shard that lies on a web server, without copying the shard."""
    samples = ({"__key__": f"{number:03d}", "txt": f"sample {number}".encode()} for number in range(5))
    (path,) = pack(samples, server.root)
    shard = Shard.open(path)
    remote = StoredFile(HttpStore(server.url), path.name)
    found = list(members(remote, str(path)))
    assert [remote[member.offset : member.offset + member.size] for member in found] == [
        bytes(shard[number]["txt"]) for number in range(len(shard))
    ]
    assert all("bytes=" in request for request in server.requests[1:])
