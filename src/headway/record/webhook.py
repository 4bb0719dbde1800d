"""Posts JSON to a webhook: a few tries, each with a time limit; messages never contain the address."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote, urlsplit

from headway.record.terminal_lines import plain

_TRIES = 3
_PAUSE_S = 1.0
"""before the second try; four times as long before the third"""
_REPLY_S = 5.0
"""how long a server has for its reply, and for each step of the connection"""
_TOO_MANY = 429
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
"""the standard phrases: those of the server may repeat the address"""
_SHORTEST_SECRET = 4


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: an alert is meant for one server."""

    def redirect_request(self, *_: object) -> None:
        return None


def post(url: str, facts: Mapping[str, Any]) -> str | None:
    """Posts facts as JSON; returns why that failed, or None. Uses the proxies of the environment.

    >>> post("https://example.org/hook", {"text": "headway: digits-x7k2 failed"})  # doctest: +SKIP
    """
    body = json.dumps(facts).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "headway"}
    opener = urllib.request.build_opener(_NoRedirect)
    problem = None
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S * 4 ** (number - 1))
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with opener.open(request, timeout=_REPLY_S):
                return None
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code} {_PHRASES.get(error.code, '')}".rstrip()
            error.close()
            if error.code < 500 and error.code != _TOO_MANY:  # another try would be refused, too
                break
        except urllib.error.URLError as error:
            problem = str(error.reason)
        except TimeoutError:
            problem = f"it did not answer within {_REPLY_S:g} s"
        except (OSError, HTTPException, ValueError) as error:
            problem = type(error).__name__
    return problem and _without_address(problem, url)


def _without_address(problem: str, url: str) -> str:
    """Returns a message without secret parts of an address and without control characters."""
    parts = urlsplit(url)
    words = re.split(r"[/?&=;:@]", f"{parts.path}?{parts.query}?{parts.netloc.rpartition('@')[0]}")
    secrets = {url, parts.path, parts.query, *words, *map(unquote, words)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            problem = problem.replace(secret, "...")
    return plain(problem)
