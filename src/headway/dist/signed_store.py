"""The store that ranks share, with a signature on every value.

torch's store listens on a port through which every user of the node can list and write values. gloo and NCCL take the
addresses of the other ranks from it, so a stranger who changes one can read and replace what ranks exchange. Here each
value is signed with the key of the launch, together with its name, so reading a value that a stranger has written, or
copied from another name, raises. Counters (`add`) are not signed, keys can be removed, and an older value of the same
name can be written back: that can break a run, but it reveals nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch.distributed as c10d

from headway.errors import RankFailure, UsageError

_TAG_BYTES = 32


def sign(key: bytes, context: str, value: bytes) -> bytes:
    """Returns the value with its signature in front. The context names the value, so no other can take its place."""
    message = f"{len(context.encode())} {context} ".encode() + value
    return hmac.digest(key, message, "sha256") + value


def verify(key: bytes, context: str, signed: bytes) -> bytes:
    """Returns a signed value without its signature. Raises unless it was signed with this key, in this context."""
    value = signed[_TAG_BYTES:]
    if not hmac.compare_digest(signed, sign(key, context, value)):
        raise RankFailure(
            f"{context:.200} was not written by a rank of this run: another user of this node may be interfering; "
            f"tell your administrators, and start again on nodes of your own"
        )
    return value


def _is_number(found: bytes) -> bool:
    """Whether this is a counter: a signature is never a number."""
    return found.removeprefix(b"-").isdigit()


@final
class SignedStore(c10d.Store):
    """A store of torch in which every value is signed; the inner store moves the bytes."""

    def __init__(self, inner: c10d.Store, key: bytes) -> None:
        super().__init__()
        self._inner = inner
        self._key = key

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._sign(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        found = self._inner.get(key)
        if _is_number(found):
            raise UsageError(
                f"{key!r} in the store is a number without a signature; if it is a counter, read it with "
                f"add(name, 0), which returns its value"
            )
        return verify(self._key, f"the value of {key!r} in the store", found)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        # empty: the key does not exist yet
        expected = self._sign(key, expected_value) if expected_value else b""
        found = self._inner.compare_set(key, expected, self._sign(key, desired_value))  # type: ignore[arg-type]
        return verify(self._key, f"the value of {key!r} in the store", found) if found else b""

    def add(self, key: str, value: int) -> int:
        # torch's server answers this by closing the connection
        if self._inner.check([key]) and not _is_number(self._inner.get(key)):
            raise UsageError(
                f"add({key!r}): the store has a value of that name, which set() has written, and not a counter; use "
                f"another name, or delete_key() first"
            )
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(list(keys), self._inner.timeout if timeout is None else timeout)  # type: ignore[attr-defined]

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    # the names under which torch's own stores, such as PrefixStore, call these two
    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def clone(self) -> SignedStore:
        """Returns the same store over a connection of its own, for another thread."""
        return SignedStore(self._inner.clone(), self._key)  # type: ignore[attr-defined]

    def _sign(self, key: str, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return sign(self._key, f"the value of {key!r} in the store", raw)
