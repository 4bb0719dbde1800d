"""Alerts: one message to a webhook or a command when a run fails, stops, is silent or finishes.

A process that watches the run sends them, never a rank. If several watch it, the first one to create
`alerts/EVENT.json` in the run directory sends the alert. Environment variables of the watching process name the
destination: the address of a webhook is often a secret, and is neither written to the run nor displayed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, final, get_args
from urllib.parse import urlsplit

from headway.errors import UsageError
from headway.run import Run
from headway.run.info import read_json
from headway.system import environment, files
from headway.system.locks import block_forks
from headway.system.log import logger
from headway.system.redact import redact

AlertEvent = Literal["failed", "stopped", "silent", "finished"]
EVENTS: tuple[AlertEvent, ...] = get_args(AlertEvent)
_COMMAND_S = 30.0
_WHY_CHARACTERS = 1000
"""the limit for the reason in a message: Discord refuses messages of more than 2,000 characters"""


@final
@dataclass(frozen=True, kw_only=True)
class Alert:
    """An event of a run. `key` is the same in all processes that see this event, and differs for the next one."""

    event: AlertEvent
    key: str
    run: str
    name: str
    path: str
    why: str = ""
    step: int | None = None

    @classmethod
    def of(
        cls, run: Run, event: AlertEvent, *, attempts: int, why: str = "", step: int | None = None
    ) -> Alert:
        """Returns the alert for an event in the last attempt: an attempt ends once, and is silent once per step."""
        key = f"{event}-{attempts}"
        if event == "silent":
            key = f"{key}-{step or 0}"
        elif not attempts:  # a job that ended before its ranks started may do so again
            ended = str((read_json(run.ended_file) or {}).get("time", ""))
            key = f"{key}-{''.join(filter(str.isdigit, ended))[:20]}"
        return cls(event=event, key=key, run=run.id, name=run.name, path=str(run.path), why=why, step=step)

    @property
    def sentence(self) -> str:
        """The message: what happened, in one line, without secrets.

        >>> Alert(event="failed", key="1", run="digits-x7k2", name="digits", path="runs/x", why="KeyError").sentence
        'headway: digits-x7k2 failed: KeyError'
        """
        verb = {"silent": "is silent", "stopped": "was stopped"}.get(self.event, self.event)
        at = f" at step {self.step:,}" if self.step is not None else ""
        why = " ".join(redact(self.why).split())
        why = why if len(why) <= _WHY_CHARACTERS else f"{why[: _WHY_CHARACTERS - 1]}…"
        return f"headway: {self.run} {verb}{at}{why and f': {why}'}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the body of the request. Slack, Mattermost, Teams and Discord display `text` or `content`."""
        facts = asdict(self) | {"why": redact(self.why), "host": socket.gethostname(), "time": time.time()}
        return {"text": self.sentence, "content": self.sentence, **facts}


def alert_events(names: Iterable[str]) -> frozenset[AlertEvent]:
    """Returns the events with these names; `all` means every one. `UsageError` for an unknown name.

    >>> sorted(alert_events(["failed", "silent"]))
    ['failed', 'silent']
    """
    given = set(names)
    if wrong := sorted(given - {*EVENTS, "all"}):
        raise UsageError(f"alert {wrong[0]!r:.40} is not an event; expected {', '.join(EVENTS)} or all")
    return frozenset(event for event in EVENTS if event in given or "all" in given)


@final
@dataclass(frozen=True, kw_only=True)
class AlertChannels:
    """The destinations of alerts: a webhook, a command, or both.

    >>> AlertChannels.from_environment({"HEADWAY_ALERT_COMMAND": "mail -s {subject} me@example.org"}).command
    ('mail', '-s', '{subject}', 'me@example.org')
    """

    url: str | None = None
    command: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AlertChannels:
        """Returns the channels that the variables name; `UsageError` if there are none, or if one is not valid."""
        url = environ.get(environment.ALERT_URL, "").strip() or None
        text = environ.get(environment.ALERT_COMMAND, "")
        if url is None and not text.strip():
            raise UsageError(
                f"alerts need a destination: set {environment.ALERT_URL} to the address of a webhook, "
                f"or {environment.ALERT_COMMAND} to a command, such as 'mail -s {{subject}} me@example.org'"
            )
        try:
            parts = urlsplit(url or "http://none")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            valid = False
        if not valid:  # the address itself may be a secret
            raise UsageError(
                f"{environment.ALERT_URL} is not a valid address: give one with https:// or http://"
            )
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(
                f"{environment.ALERT_COMMAND} is not a valid command: {error}"
                f"; give one such as 'mail -s {{subject}} me@example.org'"
            ) from error
        return cls(url=url, command=words)

    def names(self) -> list[str]:
        """Returns names of the channels for messages, without the address of a webhook, which is often a secret."""
        return [*(["the webhook"] if self.url else []), *self.command[:1]]

    def send(self, alert: Alert) -> list[str]:
        """Sends an alert through all channels, with a few tries each; returns the problems. May take a while."""
        from headway.record.webhook import post  # the import takes 40 ms, which agents without alerts save

        problems = []
        if self.url is not None and (problem := post(self.url, alert.to_dict())):
            problems.append(f"the webhook: {problem}")
        if self.command and (problem := _call(self.command, alert)):
            problems.append(f"{self.command[0]}: {problem}")
        return problems


@final
class AlertSender:
    """Sends each alert once, in a thread, so that neither a screen nor the end of a job waits for a server.

    >>> sender = AlertSender(AlertChannels.from_environment(), alert_events(["all"]))
    >>> sender.send(run, alert)
    >>> sender.wait(10.0)
    """

    def __init__(
        self,
        channels: AlertChannels,
        events: frozenset[AlertEvent],
        *,
        report: Callable[[str], object] = logger.warning,  # what could not be sent
    ) -> None:
        self._channels, self._events = channels, events
        self.report = report
        self._sending: list[tuple[Alert, threading.Thread]] = []

    def send(self, run: Run, alert: Alert) -> bool:
        """Starts to send an alert, unless its event is not enabled or another process has claimed it."""
        if alert.event not in self._events or not self._claim(run, alert):
            return False
        thread = threading.Thread(target=self._deliver, args=(run, alert), daemon=True, name="headway alert")
        thread.start()
        self._sending.append((alert, thread))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Waits for pending alerts; reports those that are not sent in time, and returns whether all were sent."""
        deadline = time.monotonic() + timeout_s
        for _, thread in self._sending:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [alert for alert, thread in self._sending if thread.is_alive()]
        for alert in late:
            where = " and ".join(self._channels.names())
            self.report(f"an alert was not sent ({alert.sentence}): {where} took more than {timeout_s:g} s")
        return not late

    def _claim(self, run: Run, alert: Alert) -> bool:
        """Returns whether this process is the one to send an alert: exactly one is, on any host."""
        try:
            with suppress(FileExistsError):
                files.make_dir(run.alerts_dir)
            return files.publish(run.alert_file(alert.key), _record(alert, sent=False))
        except OSError as error:
            self.report(f"an alert was not sent ({alert.sentence}): {run.alerts_dir}: {error.strerror}")
            return False

    def _deliver(self, run: Run, alert: Alert) -> None:
        problems = self._channels.send(alert)
        for problem in problems:
            self.report(f"an alert was not sent ({alert.sentence}): {problem}")
        with suppress(OSError):  # the run may have been removed
            files.write_atomic(
                run.alert_file(alert.key), _record(alert, sent=not problems, problems=problems)
            )


def _record(alert: Alert, **facts: object) -> bytes:
    who = {"event": alert.event, "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(who | facts).encode()


def _call(command: tuple[str, ...], alert: Alert) -> str | None:
    """Runs a command without a shell, with the alert on its standard input; returns why that failed."""
    words = [word.replace("{subject}", _any_text(alert.sentence)) for word in command]
    text = f"{alert.sentence}\n\nrun directory: {alert.path}\nmore: headway watch {alert.path}\n"
    try:
        # a file for the message: data workers that another thread forks now would keep a pipe open
        with tempfile.TemporaryFile() as message, block_forks():
            message.write(_any_text(text).encode())
            message.seek(0)
            process = subprocess.Popen(
                words,
                stdin=message,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process that watches
            )
    except OSError as error:
        return error.strerror
    try:
        process.wait(timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it did not end within {_COMMAND_S:.0f} s"
    return f"it ended with {process.returncode}" if process.returncode else None


def _any_text(text: str) -> str:
    """Escapes what UTF-8 or an argument cannot hold: an error may contain file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")
