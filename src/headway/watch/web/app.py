"""The routes of the page. Requests name runs by keys, which are looked up and never become part of a path."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.watch.web import curves, texts
from headway.watch.web.assets import assets
from headway.watch.web.blocks import blocks, to_json
from headway.watch.web.guard import Application, Guard
from headway.watch.web.heat_map import heat_map
from headway.watch.web.media import Picture
from headway.watch.web.run_library import OpenRun, RunLibrary
from headway.watch.web.run_list import RunList

_LIVE_S = 1.0
_PING_TICKS = 15
_MAX_STREAMS = 32
_MAX_RUNS = 16
_MAX_METRICS = 64
_MAX_NUMBER = 1 << 53


def make_app(library: RunLibrary, *, token: str, cookie: str = "headway") -> Application:
    """Returns the application behind its `Guard`.

    >>> app = make_app(RunLibrary(root=Path("runs")), token=secrets.token_urlsafe(32))
    """
    answers = _Answers(library)
    routes = [
        Route("/", _asset("index.html")),
        *(Route(f"/static/{name}", _asset(name)) for name in assets() if name != "index.html"),
        Route("/api/runs", answers.runs),
        Route("/api/run", answers.run),
        Route("/api/live", answers.live),
        Route("/api/curves", answers.curves),
        Route("/api/phases", answers.phases),
        Route("/api/ranks", answers.ranks),
        Route("/api/settings", answers.settings),
        Route("/api/diagnostics", answers.diagnostics),
        Route("/api/log", answers.log),
        Route("/api/media", answers.media),
        Route("/api/media/file", answers.media_file),
    ]
    compression = Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)  # an ssh tunnel may be slow
    return Guard(Starlette(routes=routes, middleware=[compression]), token=token, cookie=cookie)


def _asset(name: str) -> Callable[[Request], Response]:
    def answer(_: Request) -> Response:
        asset = assets()[name]
        return Response(asset.data, media_type=asset.media_type)

    return answer


class _BadRequest(Exception):
    """A request that cannot be answered, with the status of the response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _answered(work: Callable[[Any, Request], Any]) -> Callable[[Any, Request], Response]:
    """Makes a method that returns plain values respond with JSON, or with the reason of a `_BadRequest`."""

    def answer(self: Any, request: Request) -> Response:
        try:
            found = work(self, request)
        except _BadRequest as error:
            return PlainTextResponse(f"{error}\n", status_code=error.status)
        if isinstance(found, Picture):
            return Response(found.data, media_type=found.media_type)
        return Response(to_json(found), media_type="application/json")

    return answer


class _Stream(StreamingResponse):
    """Events for one page. Calls `leave` however the stream ends, also if it never begins."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], object]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class _Answers:
    """The handlers of all routes. Starlette calls them in threads."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._list = RunList(library)
        self._streams = threading.BoundedSemaphore(_MAX_STREAMS)

    @_answered
    def runs(self, _: Request) -> Any:
        return self._list.rows()

    @_answered
    def run(self, request: Request) -> Any:
        return blocks(self._open(request).refresh())

    @_answered
    def curves(self, request: Request) -> Any:
        metrics, is_whole = self._open(request).metrics()
        names = request.query_params.getlist("metric")[:_MAX_METRICS]
        first, last = _number(request, "from"), _number(request, "to")
        found = [curves.curve(metrics, name, _points(request), first, last) for name in names]
        return {"curves": [each for each in found if each], "began": metrics.began, "is_whole": is_whole}

    @_answered
    def phases(self, request: Request) -> Any:
        metrics, is_whole = self._open(request).metrics()
        return {"phases": curves.phases(metrics, _points(request)), "is_whole": is_whole}

    @_answered
    def ranks(self, request: Request) -> Any:
        found = self._open(request)
        world_size = found.refresh().header.world_size
        return heat_map(
            found.run, world_size, "data" if request.query_params.get("what") == "data" else "own"
        )

    @_answered
    def settings(self, request: Request) -> Any:
        known = self._library.runs()
        keys = request.query_params.getlist("run")[:_MAX_RUNS]
        if not keys or not all(key in known for key in keys):
            raise _BadRequest(404, "there is no such run")
        return texts.settings_table([known[key] for key in keys])

    @_answered
    def diagnostics(self, request: Request) -> Any:
        return {"lines": texts.diagnostics(self._open(request).run)}

    @_answered
    def log(self, request: Request) -> Any:
        run, query = self._open(request).run, request.query_params
        names = texts.log_names(run)
        name = query.get("name", names[0] if names else "")
        page = texts.log_page(run, name, _number(request, "end"), query.get("search", "")[:200])
        if page is None and "name" in query:
            raise _BadRequest(404, "there is no such log")
        return {"names": names, "name": name, **(page or {"lines": [], "begin": 0, "left_out": 0})}

    @_answered
    def media(self, request: Request) -> Any:
        query = request.query_params
        return self._open(request).media_page(query.get("name", ""), query.get("search", "")[:200])

    @_answered
    def media_file(self, request: Request) -> Any:
        found = self._open(request).media_content(request.query_params.get("file", ""))
        if found is None:
            raise _BadRequest(404, "there is no such file")
        return found

    async def live(self, request: Request) -> Response:
        """Streams the state of the run, or the list of runs, each time it changes."""
        key = request.query_params.get("run")
        if key is not None and await run_in_threadpool(self._library.open, key) is None:
            return PlainTextResponse("there is no such run\n", status_code=404)
        if not self._streams.acquire(blocking=False):
            return PlainTextResponse("too many pages are open\n", status_code=503)
        return _Stream(self._events(key), self._streams.release)

    async def _events(self, key: str | None) -> AsyncIterator[bytes]:
        sent, ticks = b"", 0
        while True:
            data = await run_in_threadpool(self._state, key)
            if data is None:
                yield b"event: gone\ndata: {}\n\n"
                return
            ticks += 1
            if data != sent or ticks >= _PING_TICKS:
                yield b"data: " + data + b"\n\n" if data != sent else b": still here\n\n"
                sent, ticks = data, 0
            await asyncio.sleep(_LIVE_S)

    def _state(self, key: str | None) -> bytes | None:
        if key is None:
            return to_json(self._list.rows())
        found = self._library.open(key)
        return None if found is None else to_json(blocks(found.refresh()))

    def _open(self, request: Request) -> OpenRun:
        found = self._library.open(request.query_params.get("run", ""))
        if found is None:
            raise _BadRequest(404, "there is no such run")
        return found


def _points(request: Request) -> int:
    """Returns how many points a curve may have."""
    return min(curves.MAX_POINTS, _number(request, "points") or curves.MAX_POINTS)


def _number(request: Request, name: str) -> int | None:
    """Returns a number of the query; None if it is not given."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise _BadRequest(400, f"{name} must be a whole number of 0 or more")
    return min(int(text), _MAX_NUMBER)
