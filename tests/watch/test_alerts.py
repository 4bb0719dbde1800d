"""Alerts against a real server and a real command: once per event, whoever watches, and never at a rank's cost."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import make_run, row, write_rows

from headway.cli import main, watch as watch_verb
from headway.errors import INTERRUPTED, UsageError
from headway.launcher import epilogue
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm
from headway.record import alerts, webhook
from headway.record.alerts import Alert, AlertChannels, AlertSender, alert_events
from headway.record.diagnostics import collect
from headway.run import Run
from headway.run.job_record import record_end
from headway.system.redact import environment as recorded, redact
from headway.watch import alerting
from headway.watch.alerting import AlertWatch
from headway.watch.view import RunView, Snapshot

ALL = alert_events(["all"])
SECRET = "s3cr3t-path-of-the-hook"


class Hook:
    """A webhook on the loopback: keeps what is posted, and answers with the next of `answers`, then 200."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.answers: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json" and self.path == f"/{SECRET}"
                hook.posts.append(json.loads(body))
                self.send_response(hook.answers.pop(0) if hook.answers else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(webhook, "_PAUSE_S", 0.0)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Hook()
    monkeypatch.setenv("HEADWAY_ALERT_URL", made.url)
    monkeypatch.delenv("HEADWAY_ALERT_COMMAND", raising=False)
    yield made
    made.server.shutdown()
    made.server.server_close()


def sender(report: Any = pytest.fail, events: Any = ALL) -> AlertSender:
    return AlertSender(AlertChannels.from_environment(), events, report=report)


def failed(run: Run, attempts: int = 1) -> Alert:
    return Alert.of(run, "failed", attempts=attempts, why="KeyError: 'x'", step=7)


# ---- one alert


def test_a_webhook_gets_what_happened_as_json(tmp_path: Path, hook: Hook) -> None:
    run = make_run(tmp_path)
    first = sender()
    assert first.send(run, failed(run)) and first.wait(20)
    (post,) = hook.posts
    assert post["text"] == post["content"] == f"headway: {run.id} failed at step 7: KeyError: 'x'"
    assert (post["event"], post["run"], post["path"], post["step"]) == ("failed", run.id, str(run.path), 7)
    facts = json.loads((run.alerts_dir / "failed-1.json").read_bytes())
    assert facts["sent"] and facts["pid"] == os.getpid()


def test_a_long_reason_is_cut_in_the_sentence_alone(tmp_path: Path) -> None:
    """Discord refuses more than 2,000 characters, and a model that does not fit its checkpoint has more keys."""
    why = "Missing key(s): " + ", ".join(f"layers.{number}.weight" for number in range(200))
    alert = Alert.of(make_run(tmp_path), "failed", attempts=1, why=why, step=7)
    assert len(alert.sentence) < 1200 and alert.sentence.endswith("…") and "layers.0.weight" in alert.sentence
    assert alert.to_dict()["why"] == why


def test_of_many_watchers_one_sends_and_the_next_attempt_is_news(tmp_path: Path, hook: Hook) -> None:
    run = make_run(tmp_path)
    senders = [sender() for _ in range(8)]
    begin = threading.Barrier(8)

    def race(each: AlertSender) -> None:
        begin.wait()
        each.send(run, failed(run))
        each.wait(20)

    threads = [threading.Thread(target=race, args=(each,)) for each in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hook.posts) == 1
    assert senders[3].send(run, failed(run, attempts=2)) and senders[3].wait(20)
    assert not sender(events=alert_events(["finished"])).send(run, failed(run, attempts=3)), "nobody asked"
    assert len(hook.posts) == 2


@pytest.mark.parametrize(
    ("answers", "posts", "problem"),
    [
        ([503, 429], 3, None),
        ([500, 502, 503], 3, "the webhook: it answered 503 Service Unavailable"),
        ([404], 1, "the webhook: it answered 404 Not Found"),
        ([307], 1, "the webhook: it answered 307 Temporary Redirect"),
    ],
)
def test_a_server_that_refuses_is_tried_again_only_if_that_may_help(
    tmp_path: Path, hook: Hook, answers: list[int], posts: int, problem: str | None
) -> None:
    run = make_run(tmp_path)
    hook.answers, told = list(answers), []
    one = sender(told.append)
    assert one.send(run, failed(run)) and one.wait(20)
    assert len(hook.posts) == posts
    assert [text.partition("): ")[2] for text in told] == ([problem] if problem else [])
    facts = json.loads((run.alerts_dir / "failed-1.json").read_bytes())
    assert facts["sent"] == (problem is None) and SECRET not in str(facts) + str(told)


def test_a_dead_server_costs_nothing(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts and never answers, and one that is not there: who sends does not wait."""
    monkeypatch.setattr(webhook, "_REPLY_S", 0.1)
    run, told = make_run(tmp_path), []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for number, port in enumerate((silent.getsockname()[1], 9), 1):
            monkeypatch.setenv("HEADWAY_ALERT_URL", f"http://127.0.0.1:{port}/{SECRET}")
            one = sender(told.append)
            one.send(run, failed(run, attempts=number))
            assert one.wait(30)
    assert len(told) == 2 and "did not answer within 0.1 s" in told[0] and "refused" in told[1], told
    assert SECRET not in str(told)
    assert hook.posts == []


def test_a_server_that_hangs_until_one_leaves_is_named(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = make_run(tmp_path), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HEADWAY_ALERT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}")
        one = sender(told.append)
        one.send(run, failed(run))
        assert not one.wait(0.1)
    (line,) = told
    assert line.startswith(f"an alert was not sent (headway: {run.id} failed at step 7")
    assert line.endswith("the webhook took more than 0.1 s") and hook.posts == []


def test_a_command_gets_the_alert_on_its_input_and_no_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mailer.py"
    program.write_text(
        "import json, sys\n"
        "json.dump([sys.argv[1:], sys.stdin.read()], open(sys.argv[1], 'w'))\n"
        "sys.exit(len(sys.argv) > 3)\n"
    )
    out = tmp_path / "got.json"
    monkeypatch.delenv("HEADWAY_ALERT_URL", raising=False)
    monkeypatch.setenv("HEADWAY_ALERT_COMMAND", f"{sys.executable} {program} {out} {{subject}}")
    run, told = make_run(tmp_path / "runs"), []
    hostile = Alert.of(run, "stopped", attempts=1, why="$(touch hit); `id`\nBcc: all@example.org")
    one = sender(told.append)
    assert one.send(run, hostile) and one.wait(60)
    (arguments, text) = json.loads(out.read_text())
    assert arguments[1] == f"headway: {run.id} was stopped: $(touch hit); `id` Bcc: all@example.org"
    assert f"headway watch {run.path}" in text and told == []
    for command, problem in (
        (f"{sys.executable} {program} {out} {{subject}} more", "it ended with 1"),
        ("no-such-mailer", "No such file or directory"),
        ("sleep 60", "it did not end within"),
    ):
        monkeypatch.setenv("HEADWAY_ALERT_COMMAND", command)
        monkeypatch.setattr(alerts, "_COMMAND_S", 0.2 if command == "sleep 60" else 30.0)
        assert problem in AlertChannels.from_environment().send(hostile)[0]


def test_a_command_gets_an_error_that_is_not_utf_8(tmp_path: Path) -> None:
    """Names of files in an error may be any bytes; the end of a job passes its error on as it is."""
    alert = Alert.of(make_run(tmp_path), "failed", attempts=1, why="cannot read caf\udce9.png\0, nor \ud800")
    got = tmp_path / "got"
    command = (
        sys.executable,
        "-c",
        "import sys; open(sys.argv[1], 'w').write(sys.argv[2])",
        str(got),
        "{subject}",
    )
    assert AlertChannels(command=command).send(alert) == []
    assert "caf\\udce9.png" in got.read_text() and "\0" not in got.read_text()
    assert AlertChannels(command=("tee", str(got))).send(alert) == []
    assert "caf\\udce9.png" in got.read_text()


def test_a_command_gets_the_end_of_its_input_though_a_process_was_forked_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a data worker is, by the training thread: it has copies of all files that are open then."""
    forked: list[int] = []

    class Forking(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if not (pid := os.fork()):
                signal.pause()
            forked.append(pid)

    monkeypatch.setattr(subprocess, "Popen", Forking)
    alert = Alert.of(make_run(tmp_path), "failed", attempts=1, why="x" * 200_000)
    try:
        assert AlertChannels(command=("tee", str(tmp_path / "got"))).send(alert) == []
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert (tmp_path / "got").read_text().startswith(f"{alert.sentence}\n\nrun directory: ") and forked


def test_the_address_is_a_secret(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_ALERT_COMMAND", command := f"curl -d text https://chat.example.org/{SECRET}")
    assert SECRET not in redact(f"running {command}") and "HEADWAY_ALERT_COMMAND" not in recorded()
    assert SECRET not in redact(f"posting to {hook.url}") and "HEADWAY_ALERT_URL" not in recorded()
    assert SECRET not in json.dumps(collect(), default=str)
    run = make_run(tmp_path)
    alert = Alert.of(run, "failed", attempts=1, why=f"could not reach {hook.url}")
    assert SECRET not in json.dumps(alert.to_dict())
    for wrong in ("ftp://host/x", "file:///etc/passwd", "hooks.example.org/x", "http://[/x"):
        monkeypatch.setenv("HEADWAY_ALERT_URL", wrong)
        with pytest.raises(UsageError, match="is not a valid address") as error:
            AlertChannels.from_environment()
        assert wrong not in str(error.value)


# ---- who watches


def test_a_watched_run_that_fails_stops_or_finishes_sends_one_alert(tmp_path: Path, hook: Hook) -> None:
    for status, event in (
        ("failed", "failed"),
        ("stopped", "stopped"),
        ("interrupted", "stopped"),
        ("done", "finished"),
    ):
        run = make_run(tmp_path / status)
        over = make_run(tmp_path / status)
        over.end_attempt(1, status="failed", exit_code=1)  # no news
        one = sender()
        watch = AlertWatch(lambda run=run, over=over: [run, over], one, look_s=600)
        with run.lock(), watch, AlertWatch(lambda run=run: [run], sender(), look_s=600):  # two watch it
            watch.look()
            assert hook.posts == []
            run.end_attempt(1, status=status, exit_code=1)
        assert [(post["run"], post["event"]) for post in hook.posts] == [(run.id, event)]
        with AlertWatch(lambda run=run: [run], sender(), look_s=600):
            pass  # another one comes later
        assert len(hook.posts) == 1
        hook.posts.clear()


def test_a_run_that_is_started_again_is_watched_again(tmp_path: Path, hook: Hook) -> None:
    run = make_run(tmp_path)
    run.end_attempt(1, status="failed", exit_code=1)
    one = sender()
    watch = AlertWatch(lambda: [run], one)
    watch.look()
    with run.lock():
        run.begin_attempt(world={"world_size": 2, "nodes": 1, "device": "cpu"})
        watch.look()
        run.end_attempt(2, status="done", exit_code=0)
    watch.look()
    watch.look()
    assert one.wait(20) and [post["key"] for post in hook.posts] == ["finished-2"]


def test_a_job_without_attempts_that_is_started_again_is_watched_again(tmp_path: Path, hook: Hook) -> None:
    """A plain script, or a job that ends before its ranks start."""
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    record_end(run, 1)
    before = json.loads(run.ended_file.read_text()) | {"time": "2026-11-15T14:30:00.000+00:00"}
    run.ended_file.write_text(json.dumps(before))
    one = sender()
    watch = AlertWatch(lambda: [run], one)
    watch.look()
    watch.look()
    assert hook.posts == [], "it was over before"
    record_end(run, 0)
    watch.look()
    watch.look()
    assert one.wait(20) and [post["event"] for post in hook.posts] == ["finished"]


def test_what_begins_and_ends_between_two_looks_is_news(tmp_path: Path, hook: Hook) -> None:
    first = make_run(tmp_path)
    first.end_attempt(1, status="failed", exit_code=1)
    runs, one = [first], sender()
    watch = AlertWatch(lambda: runs, one)
    watch.look()
    runs.append(make_run(tmp_path))
    runs[1].end_attempt(1, status="failed", exit_code=1)
    first.begin_attempt(world={"world_size": 2, "nodes": 1, "device": "cpu"})
    first.end_attempt(2, status="done", exit_code=0)
    watch.look()
    watch.look()
    assert one.wait(60)
    assert sorted((post["run"], post["key"]) for post in hook.posts) == sorted(
        [(first.id, "finished-2"), (runs[1].id, "failed-1")]
    )


def test_runs_that_cannot_be_found_or_read_for_a_while_are_watched_afterwards(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, over = make_run(tmp_path), make_run(tmp_path)
    over.end_attempt(1, status="failed", exit_code=1)
    told: list[str] = []
    refresh = RunView.refresh

    def stall(view: RunView) -> Snapshot:
        if view.run == over:
            raise OSError("the file system stalls")
        return refresh(view)

    monkeypatch.setattr(RunView, "refresh", stall)
    monkeypatch.setattr(alerting, "summarize", lambda *_, **__: [])  # which leaves out what it cannot read
    root = {"is": "there"}

    def find() -> list[Run]:
        if root["is"] == "gone":
            raise UsageError("there are no runs in runs")
        return [run, over]

    one = sender(told.append)
    with run.lock(), AlertWatch(find, one, look_s=600) as watch:
        monkeypatch.setattr(RunView, "refresh", refresh)
        for root["is"] in ("gone", "gone", "there", "gone"):
            watch.look()
        run.end_attempt(1, status="failed", exit_code=1)
        root["is"] = "there"
    assert [post["run"] for post in hook.posts] == [run.id], "the other one had failed before"
    missing = "no run is watched for alerts now: there are no runs in runs"
    stalled = f"{over.id} is not watched for alerts now: the file system stalls"
    assert told == [stalled, missing, missing], "once for each time that they were gone"


def test_what_a_server_says_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    run, told = make_run(tmp_path), []
    reason = f"no hook at /{SECRET} or {SECRET[3:]}\x1b]0;gone\x07"
    monkeypatch.setattr(BaseHTTPRequestHandler, "responses", {404: (reason, ""), 499: (reason, "")})
    hook.answers = [404, 499]
    for number in (1, 2):
        one = sender(told.append)
        assert one.send(run, failed(run, attempts=number)) and one.wait(20)
    said = [text.partition("): ")[2] for text in told]
    assert said == ["the webhook: it answered 404 Not Found", "the webhook: it answered 499"]
    kept = "".join(path.read_text() for path in run.alerts_dir.iterdir())
    assert SECRET[3:] not in kept and "u001b" not in kept


def test_an_error_that_quotes_a_part_of_the_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_TRIES", 1)

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError(
            "\x1b[31mno way to T0123/B456 by POST /services/T0123/B456?key=k3y4567\x1b[0m"
        )

    monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
    problem = webhook.post("https://hooks.example.org/services/T0123/B456?key=k3y4567", {})
    assert problem and not re.search(r"T0123|B456|k3y4567|\x1b", problem) and "no way to" in problem


def test_a_run_that_cannot_be_understood_does_not_hide_the_others(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, run = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    refresh = RunView.refresh
    monkeypatch.setattr(RunView, "refresh", lambda view: {}["x"] if view.run == odd else refresh(view))
    told: list[str] = []
    with run.lock(), AlertWatch(lambda: [odd, run], sender(told.append), look_s=600):
        run.end_attempt(1, status="failed", exit_code=1)
    assert [post["run"] for post in hook.posts] == [run.id]
    assert told == [f"{odd.id} is not watched for alerts now: 'x'"]


def test_silence_is_reported_once_and_again_when_it_comes_back(tmp_path: Path, hook: Hook) -> None:
    run = make_run(tmp_path, log_points=4, waited_s=1000)
    run.events_file(0).unlink()
    one = sender()
    watch = AlertWatch(lambda: [run], one)
    with run.lock():
        for steps in (4, 4, 5):
            write_rows(
                run.metrics_file(0), [row(10 * n, 0, int(time.time()) - 100 + n) for n in range(1, steps + 1)]
            )
            watch.look()
            watch.look()
    assert one.wait(20)
    assert sorted((post["event"], post["step"]) for post in hook.posts) == [("silent", 40), ("silent", 50)]
    assert "nothing was written for 1m" in hook.posts[0]["why"]


def test_a_run_that_looks_lost_for_a_moment_is_not_news(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    one = sender()
    watch = AlertWatch(lambda: [run], one)
    with run.lock():
        watch.look()
    monkeypatch.setattr(alerting, "LOST_CHECKS", 2)
    watch.look()
    assert one.wait(20) and hook.posts == []
    watch.look()
    assert one.wait(20) and [post["event"] for post in hook.posts] == ["failed"]


def test_the_command_sends_alerts_and_says_what_is_missing(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr("headway.cli.watch.follow", lambda *_: run.end_attempt(1, status="done", exit_code=0))
    with run.lock():
        assert main(["watch", str(run.path), "--alert", "finished", "--alert", "failed"]) == 0
    assert [post["event"] for post in hook.posts] == ["finished"]
    monkeypatch.delenv("HEADWAY_ALERT_URL")
    assert main(["watch", str(run.path), "--alert", "all"]) == 2
    assert "set HEADWAY_ALERT_URL to the address of a webhook" in capfd.readouterr().err
    assert main(["watch", str(run.path), "--alert", "never"]) == 2


@pytest.mark.usefixtures("hook")
def test_a_damaged_run_is_named_once_and_not_at_each_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At each check, its name would be printed over the live screen."""
    make_run(tmp_path)
    make_run(tmp_path).info_file.write_text("{")
    options = argparse.Namespace(alert=["all"], json=False, once=False, run=str(tmp_path), root="runs")
    assert len(watch_verb.list_watched(options.run, options.root)) == 1
    assert "run.json is damaged" in caplog.text
    caplog.clear()
    watch = watch_verb._alerting(options, print)
    assert isinstance(watch, AlertWatch)
    watch.look()
    assert len(watch_verb._running(options)) < 2 and caplog.text == ""


def test_runs_that_are_over_are_not_viewed_one_by_one(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, live = [make_run(tmp_path) for _ in range(3)], make_run(tmp_path)
    for run in over:
        run.end_attempt(1, status="failed", exit_code=1)
    viewed: list[str] = []
    monkeypatch.setattr(alerting, "RunView", lambda run: viewed.append(run.id) or RunView(run))
    one = sender()
    watch = AlertWatch(lambda: [*over, live], one)
    with live.lock():
        watch.look()
        watch.look()
        assert viewed == [live.id]
        again = over[0].begin_attempt(world={"world_size": 1})
        with over[0].lock():
            watch.look()
            over[0].end_attempt(again, status="failed", exit_code=1)
        watch.look()
    assert one.wait(20) and [post["run"] for post in hook.posts] == [over[0].id], "it was started again"


# ---- the job itself


@pytest.mark.parametrize(("code", "event"), [(0, "finished"), (1, "failed"), (75, "stopped")])
def test_a_job_sends_its_own_end(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, code: int, event: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(alert=("all",), requeue=False)).write(run)
    record = {"kind": "exit", "rank": 0, "host": "n1", "pid": 1, "error": "it broke", "exit_code": code}
    start = run.launch_dir / "7-0" / "round-0"
    start.mkdir(parents=True, mode=0o700)
    (start / "ended-00000.json").write_text(json.dumps({"exit_code": code}))
    if code:
        (start / "outcome.json").write_text(json.dumps({"exit_code": code, "record": record}))
    watch = AlertWatch(lambda: [run], sender())  # somebody watches the job as well
    watch.look()
    assert epilogue.main(str(run.path), str(code)) == code
    (post,) = hook.posts
    assert post["event"] == event and post["run"] == run.id
    assert ("it broke" in post["why"], "not queued again" in post["why"]) == (code == 1, code == 75)
    assert SECRET not in "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    watch.look()
    assert run.id in watch._over and len(hook.posts) == 1


def test_a_job_cannot_be_asked_to_watch_itself() -> None:
    with pytest.raises(UsageError, match="headway watch --alert silent"):
        Slurm(alert=("silent",))
    with pytest.raises(UsageError, match="alert 'ended' is not an event; expected failed, stopped"):
        Slurm(alert=("ended",))


def test_all_runs_of_a_root_are_watched_after_the_one_that_is_shown_is_over(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, shown = make_run(tmp_path / "runs"), make_run(tmp_path / "runs")
    followed: list[str] = []

    def follow(view: RunView, _: object) -> None:
        followed.append(view.run.id)
        view.run.end_attempt(1, status="done" if view.run == shown else "failed", exit_code=0)

    def leave() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.cli.watch.follow", follow)
    monkeypatch.setattr("headway.cli.watch._pause", leave)
    monkeypatch.setattr("headway.cli.watch.list_watched", lambda *_, **__: [shown, older])
    with older.lock(), shown.lock():
        assert main(["watch", str(tmp_path / "runs"), "--alert", "all"]) == INTERRUPTED
    assert followed == [shown.id, older.id]
    assert {post["run"] for post in hook.posts if post["event"] == "failed"} == {older.id}
