"""`Guard`: refuses requests from others, and restricts what a browser may do with a response.

Other users of a machine share 127.0.0.1, and any page that is open in the browser can send requests to it. So each
request needs the token; its Host header must name this machine, which defeats DNS rebinding; and only GET and HEAD are
answered.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, final
from urllib.parse import unquote_to_bytes

AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Application = Callable[[AsgiScope, Receive, Send], Awaitable[None]]

_HOST = re.compile(rb"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
_QUERY_BYTES = 8192
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_WRONG_TOKEN = "the token is missing or wrong: open the whole address that `headway web` printed"


@final
class Guard:
    """Refuses requests that are not allowed, and adds security headers to the responses to all others.

    >>> app = Guard(app, token="...", cookie="headway-8123")
    """

    def __init__(self, app: Application, *, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token.encode(), cookie.encode()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
        refusal = self._refuse(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return

        async def send_with_headers(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refuse(
        self, scope: AsgiScope, headers: list[tuple[bytes, bytes]]
    ) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Returns status, text and headers of the response to a request that is not passed on; None for others."""
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "only GET and HEAD are answered", [(b"allow", b"GET, HEAD")]
        hosts = _values(headers, b"host")
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return 421, "this server answers to 127.0.0.1 and localhost only", []
        query = bytes(scope.get("query_string", b""))
        if len(query) > _QUERY_BYTES:
            return 414, "the query is too long", []
        pairs = [part.partition(b"=") for part in query.split(b"&")]
        given = [unquote_to_bytes(value) for name, _, value in pairs if unquote_to_bytes(name) == b"token"]
        if given:
            if len(given) > 1 or not hmac.compare_digest(given[0], self._token):
                return 401, _WRONG_TOKEN, []
            # redirects to the URL without the token, so that it is neither bookmarked nor seen over a shoulder; the
            # cookie is not "Strict": a browser would not send it after a link on another page, such as JupyterLab
            cookie = self._cookie + b"=" + self._token + b"; Path=/; HttpOnly; SameSite=Lax"
            return 303, "", [(b"location", b"/"), (b"set-cookie", cookie)]
        if not any(hmac.compare_digest(each, self._token) for each in self._cookies(headers)):
            return 401, _WRONG_TOKEN, []
        if _comes_from_elsewhere(headers):
            return 403, "this request comes from another page", []
        return None

    def _cookies(self, headers: list[tuple[bytes, bytes]]) -> Iterable[bytes]:
        for header in _values(headers, b"cookie"):
            for part in header.split(b";"):
                name, _, value = part.strip().partition(b"=")
                if name == self._cookie:
                    yield value


def _comes_from_elsewhere(headers: list[tuple[bytes, bytes]]) -> bool:
    """Returns whether a page of another origin sent this; browsers count other ports of a host as the same site."""
    sites, modes = _values(headers, b"sec-fetch-site"), _values(headers, b"sec-fetch-mode")
    return any(site not in (b"same-origin", b"none") for site in sites) and b"navigate" not in modes


def _values(headers: list[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = f"{text}\n".encode()
    facts = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    facts.append((b"connection", b"close"))  # half of another request would keep it open forever
    await send({"type": "http.response.start", "status": status, "headers": [*facts, *headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": body})
