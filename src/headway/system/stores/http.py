"""A read-only store over HTTP: any server that answers HEAD and, for large objects, range requests."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from headway.errors import StorageError, UsageError
from headway.system.redact import redact
from headway.system.stores.base import ObjectInfo, Store, check_key, check_range

_RETRIED = (408, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 30.0
_SKIP_BYTES = 1 << 20


@final
class HttpStore(Store):
    """The objects below a URL.

    A request that fails, ends early or is refused temporarily is retried up to `retries` times, after a pause that
    doubles. HTTP has no listing: `index` is the key of a text object that lists all keys, one per line.

    >>> HttpStore("https://data.example.org/imagenet").get("train-000000.tar", 0, 512)  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        *,
        index: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise UsageError(
                f"{redact(url)!r} is not a valid address: give one that begins with http:// or https://"
            )
        self._url, self._index = url.rstrip("/"), index
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s

    def __str__(self) -> str:
        return redact(self._url)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if self._index is None:
            raise UsageError(
                f"{self} cannot be listed: pass index=, the key of an object that lists all keys, to HttpStore"
            )
        keys = self.get(self._index).decode().split()
        yield from (self.head(key) for key in sorted(keys) if key.startswith(prefix))

    def head(self, key: str) -> ObjectInfo:
        _, headers = self._ask("HEAD", key)
        size = headers.get("content-length", "")
        if not size.isdecimal():
            raise StorageError(
                f"{self._address(key)} has no known size: the server sends no Content-Length"
                "; copy the files, or use another server"
            )
        version = headers.get("etag") or headers.get("last-modified") or ""
        return ObjectInfo(key=key, size=int(size), version=version)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        if start == stop:
            return b""
        data, _ = self._ask("GET", key, start, stop)
        return data

    def _address(self, key: str) -> str:
        return f"{self}/{key}"

    def _ask(
        self, method: str, key: str, start: int = 0, stop: int | None = None
    ) -> tuple[bytes, dict[str, str]]:
        request = Request(f"{self._url}/{quote(check_key(key))}", method=method)
        if start or stop is not None:
            request.add_header("Range", f"bytes={start}-{'' if stop is None else stop - 1}")
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(_LONGEST_PAUSE_S, self._backoff_s * 2 ** (attempt - 1)))
            try:
                with urlopen(request, timeout=self._timeout_s) as response:
                    headers = {name.lower(): value for name, value in response.headers.items()}
                    return _body(response, start, stop), headers
            except HTTPError as error:
                error.close()
                if error.code == 416:  # the object ends before the range begins
                    return b"", {}
                if error.code in (404, 410):
                    raise FileNotFoundError(errno.ENOENT, "No such object", self._address(key)) from None
                trouble = f"HTTP status {error.code}, {error.reason}"
                if error.code not in _RETRIED:
                    break
            except (URLError, HTTPException, OSError) as error:
                trouble = str(getattr(error, "reason", "")) or f"{type(error).__name__}: {error}"
        raise StorageError(
            f"could not read {self._address(key)}: {trouble}; check the address and the network"
        )


def _body(response: HTTPResponse, start: int, stop: int | None) -> bytes:
    """Returns the bytes of the range. A server without range requests sends the whole object: the rest is skipped."""
    if response.status == 206:
        if not response.headers.get("content-range", f"bytes {start}-").startswith(f"bytes {start}-"):
            raise HTTPException(f"asked for byte {start}, got {response.headers['content-range']}")
        return response.read()
    skip, length = start, None if stop is None else stop - start
    while skip and (skipped := len(response.read(min(skip, _SKIP_BYTES)))):
        skip -= skipped
    data = response.read() if length is None else response.read(length)
    if length is not None and len(data) < length and response.length:
        raise IncompleteRead(data, response.length)
    return data
