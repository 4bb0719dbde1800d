"""The server of the page, which listens on 127.0.0.1 only."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, final
from urllib.parse import quote

from headway.errors import MissingExtra, UsageError
from headway.system import ownership
from headway.watch.web.run_library import RunLibrary

if TYPE_CHECKING:
    import asyncio

    import uvicorn

_HOST = "127.0.0.1"
_BACKLOG = 64
_REQUEST_S = 5.0
"""how long a connection may be open without a request: other users of this machine can open many, without the token"""
_LEAVE_S = 1


@final
@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of the page, and the token that opens it."""

    listener: socket.socket
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def cookie(self) -> str:
        """The name of the cookie. Browsers send cookies to all ports of a host: two servers must not share a name."""
        return f"headway-{self.port}"

    def url(self, run: str | None = None) -> str:
        """Returns the URL of the run with this key, or of the list of runs."""
        place = "" if run is None else f"#/run/{quote(run, safe='')}"
        return f"http://{_HOST}:{self.port}/?token={self.token}{place}"

    def ssh_command(self) -> str:
        """Returns the command that makes the page reachable from another machine."""
        host = f"{ownership.user_name()}@{socket.gethostname()}"
        return f"ssh -N -L {self.port}:{_HOST}:{self.port} {host}"


def listen(port: int = 0) -> Address:
    """Opens a port, by default one that the kernel picks.

    >>> listen().url()
    'http://127.0.0.1:41234/?token=...'
    """
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise MissingExtra("starlette", extra="web", purpose="to show runs in a browser")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} cannot be used: {error.strerror}; leave --port out to get a free one"
        ) from error
    listener.listen(_BACKLOG)
    return Address(listener=listener)


def serve(address: Address, library: RunLibrary) -> None:
    """Serves the page until Ctrl-C.

    >>> serve(listen(), RunLibrary(root=Path("runs")))
    """
    import uvicorn

    uvicorn.Server(make_config(address, library)).run(sockets=[address.listener])


def make_config(address: Address, library: RunLibrary) -> uvicorn.Config:
    """Returns the settings of the server. It closes idle connections, so that they cannot lock out the user."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from headway.watch.web.app import make_app

    class Impatient(H11Protocol):
        """Closes a connection on which no request comes."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(_REQUEST_S, self._close_if_idle)

        def _close_if_idle(self) -> None:
            cycle: object = self.cycle  # None until the first request, whatever its type says
            if cycle is None:
                self.transport.close()

    return uvicorn.Config(
        make_app(library, token=address.token, cookie=address.cookie),
        access_log=False,
        lifespan="off",
        http=Impatient,
        log_level="error",
        server_header=False,
        timeout_graceful_shutdown=_LEAVE_S,
        ws="none",
    )
