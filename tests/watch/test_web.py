"""The answers of `headway web`: what the files say, in bounded memory, and nothing to those who may not ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings, strategies as st
from starlette.testclient import TestClient
from synthetic_run import make_run, row, write_rows

from headway.cli import main
from headway.launcher.sweep import SweepMember
from headway.record.media import MediaIndex
from headway.run import Run
from headway.watch.view import metric_rows
from headway.watch.view.series import Series
from headway.watch.web import RunLibrary, listen, make_app, media, server as web_server
from headway.watch.web.assets import assets
from headway.watch.web.curves import decimated
from headway.watch.web.run_library import key_of
from headway.watch.web.run_list import RunList

TOKEN = "the-right-token-of-this-test-0123456789"
SECRET = f"secret-{os.urandom(8).hex()}"
BASE = "http://127.0.0.1:8123"
ADDRESSES = (
    "/api/runs", "/api/run", "/api/curves", "/api/phases", "/api/ranks", "/api/settings", "/api/diagnostics", "/api/log"
)  # fmt: skip


def client_of(library: RunLibrary, *, token: str = TOKEN) -> TestClient:
    cookies = {"headway": token} if token else {}
    return TestClient(make_app(library, token=TOKEN), base_url=BASE, cookies=cookies, follow_redirects=False)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_of(RunLibrary(root=tmp_path)) as found:
        yield found


def get(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- what is answered


def test_the_answers_are_what_the_files_say(tmp_path: Path, client: TestClient) -> None:
    run = make_run(tmp_path, ranks=16, log_points=20, slow_rank=13)
    key = key_of(run)
    with run.lock():
        shown = get(client, "/api/run", run=key)
    assert (shown["header"]["state"], shown["header"]["step"], shown["header"]["progress"]) == (
        "running",
        200,
        0.5,
    )
    assert shown["stragglers"] == [13] and shown["ranks"][0]["host"] == "cn001"
    assert [each["name"] for each in shown["learning"]] == ["train/loss", "train/grad_norm"]
    found = get(client, "/api/curves", run=key, metric=["train/loss", "none"], points=5)
    (curve,) = found["curves"]
    loss = [1 + 2 * math.exp(-step / 1e4) for step in range(10, 210, 10)]
    assert curve["step"] == [40, 80, 120, 160, 200] and curve["high"] == loss[::4]
    assert curve["mean"] == pytest.approx([sum(loss[at : at + 4]) / 4 for at in range(0, 20, 4)])
    assert curve["samples"] == [64 * 16 * step for step in curve["step"]], "64 of each of 16 ranks"
    phases = get(client, "/api/phases", run=key)["phases"]
    assert phases["data"]["mean"] == pytest.approx([0.02] * 20), "0.2 s of ten steps"
    ranks = get(client, "/api/ranks", run=key)
    assert ranks["steps"] == [150, 160, 170, 180, 190, 200]
    assert [values[-1] for values in ranks["ranks"]] == [2.0 if rank == 13 else 1.0 for rank in range(16)]
    waits = get(client, "/api/ranks", run=key, what="data")["ranks"]
    assert waits[0][0] == pytest.approx(0.2) and waits[13][0] == pytest.approx(0.4 / 1.2)


def test_the_list_has_settings_metrics_and_sweeps(tmp_path: Path, client: TestClient) -> None:
    first, second = make_run(tmp_path), make_run(tmp_path)
    member = SweepMember(sweep=first.id, index=1, size=2, settings={"seed": "7"})
    second.sweep_file.write_text(json.dumps(vars(member)))
    listed = {each["key"]: each for each in get(client, "/api/runs")}
    assert set(listed) == {key_of(first), key_of(second)}
    found = listed[key_of(second)]
    assert found["settings"] == {"lr": 0.1, "model.depth": 12, "seed": "7"} and found["sweep"] == first.id
    loss = found["metrics"]["train/loss"]
    assert loss["best"] == loss["last"] == pytest.approx(1 + 2 * math.exp(-0.02)) and loss["best_step"] == 200
    assert len(loss["spark"]) == 20 and found["step"] == 200
    compared = get(client, "/api/settings", run=[key_of(first), key_of(second)])
    assert [each["name"] for each in compared["rows"] if each["differs"]] == ["seed"]


def test_settings_that_differ_are_shown_however_many_there_are(tmp_path: Path, client: TestClient) -> None:
    runs = [make_run(tmp_path), make_run(tmp_path)]
    for number, run in enumerate(runs):
        run.config_file.write_text("".join(f"key{j}: {j if j != 250 else number}\n" for j in range(300)))
    keys = [key_of(run) for run in runs]
    shown = get(client, "/api/settings", run=keys)["rows"]
    assert [each["name"] for each in shown if each["differs"]] == ["key250"] and len(shown) == 300
    for run in runs:
        run.config_file.write_text("".join(f"key{j}: {j}\n" for j in range(3000)))
    (cut,) = (each for each in get(client, "/api/settings", run=keys)["rows"] if each["differs"])
    assert "only its first 2000 settings are compared" in cut["values"][0], "what was left out may differ"


def test_all_curves_of_a_run_begin_at_one_time(tmp_path: Path, client: TestClient) -> None:
    """The first validation is later than the first log point, on the axis of time, too."""
    run = make_run(tmp_path, log_points=4)
    rows = [row(10 * n, 0, 1e9 + n) for n in range(1, 5)]
    late = rows[2] | {"kind": "validation", "metrics": {"val/loss": 0.5}}
    write_rows(run.metrics_file(0), [*rows[:3], late, rows[3]])
    found = get(client, "/api/curves", run=key_of(run), metric=["train/loss", "val/loss"])
    assert found["began"] == 1e9 + 1 and [each["time"][0] for each in found["curves"]] == [1e9 + 1, 1e9 + 3]


def test_a_file_that_has_grown_within_the_resolution_of_its_time_is_read_again(tmp_path: Path) -> None:
    """Lustre's is a second: the last row of a run may come in the one in which the list was read."""
    run = make_run(tmp_path, log_points=1)
    run.end_attempt(1, status="done", exit_code=0)
    runs = RunList(RunLibrary(runs=[run]))
    before = run.metrics_file(0).stat()
    assert runs.rows()[0]["metrics"]["train/loss"]["last"] > 2
    with run.metrics_file(0).open("a") as file:
        file.write(json.dumps(row(20, 0, time.time()) | {"metrics": {"train/loss": 0.5}}) + "\n")
    os.utime(run.metrics_file(0), ns=(before.st_atime_ns, before.st_mtime_ns))
    runs._read_at = float("-inf")
    assert runs.rows()[0]["metrics"]["train/loss"]["last"] == 0.5


def test_logs_are_read_from_their_end_and_searched(tmp_path: Path, client: TestClient) -> None:
    run = make_run(tmp_path)
    lines = [f"line {number:06d} {'x' * 80}" for number in range(5000)]
    lines[7] = "  Traceback <script>alert(1)</script> \x1b[31mred"
    lines[8] = "name        calls\tms   "
    run.log_file(0).write_text("\n".join(lines) + "\n")
    run.log_file(1).write_text("the other rank\n")
    newest = get(client, "/api/log", run=key_of(run))
    assert newest["names"] == ["0", "1"] and newest["lines"][-1] == lines[-1]
    assert 0 < newest["begin"] < run.log_file(0).stat().st_size
    earlier = get(client, "/api/log", run=key_of(run), name="0", end=newest["begin"])
    before = lines[: 5000 - len(newest["lines"])]
    assert earlier["lines"] == before[-len(earlier["lines"]) :], "no line is missing between two pages"
    found = get(client, "/api/log", run=key_of(run), search="TRACEBACK")
    assert found["lines"] == ["  Traceback <script>alert(1)</script> red"] and found["begin"] == 0
    assert found["left_out"] == 0
    many = get(client, "/api/log", run=key_of(run), search="line")
    assert (many["lines"], many["left_out"], many["begin"]) == (lines[-500:], 4998 - 500, 0)
    table = get(client, "/api/log", run=key_of(run), search="calls")
    assert table["lines"] == ["name        calls       ms"], "columns stay below each other"
    assert client.get("/api/log", params={"run": key_of(run), "name": "../../run.json"}).status_code == 404


def test_the_diagnostics_are_those_of_the_newest_attempt(tmp_path: Path, client: TestClient) -> None:
    run = make_run(tmp_path)
    assert get(client, "/api/diagnostics", run=key_of(run))["lines"] == []
    write_rows(run.diagnostics_file, [{"host": "old"}, {"host": "cn7", "versions": {"torch": "2.13"}}])
    text = "\n".join(get(client, "/api/diagnostics", run=key_of(run))["lines"])
    assert json.loads(text) == {"host": "cn7", "versions": {"torch": "2.13"}}


def test_a_long_curve_keeps_its_spikes_and_a_range_of_it_has_every_value(
    tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_rows, "_WHOLE_BYTES", 1 << 18)
    monkeypatch.setattr(metric_rows, "_KEPT_BYTES", 1 << 16)
    monkeypatch.setattr(metric_rows, "_PART_BYTES", 1 << 17)
    monkeypatch.setattr("headway.watch.view.source._CHUNK_BYTES", 1 << 17)
    run = make_run(tmp_path)
    rows = [row(step, 0, time.time() + step / 1e3) for step in range(1, 6001)]
    rows[2345]["metrics"]["train/loss"] = 99.0
    write_rows(run.metrics_file(0), rows)
    query = {"run": key_of(run), "metric": "train/loss", "points": 200}
    get(client, "/api/curves", **query)
    wait_for_all = threading.Event()
    for _ in range(600):
        found = get(client, "/api/curves", **query)
        if found["is_whole"]:
            break
        wait_for_all.wait(0.05)
    (curve,) = found["curves"]
    assert found["is_whole"] and curve["count"] == 6000 and len(curve["step"]) <= 200
    assert max(curve["high"]) == 99 and curve["step"][curve["high"].index(99.0)] == pytest.approx(
        2346, abs=40
    )
    gaps = [b - a for a, b in zip(curve["step"], curve["step"][1:], strict=False)]
    assert len(set(gaps[:-1])) == 1, "the beginning of a long run is seen as well as its end"
    (part,) = get(client, "/api/curves", **query | {"from": 2300, "to": 2399})["curves"]
    assert part["step"] == list(range(2300, 2400)) and part["mean"][46] == 99
    for _ in range(600):  # what is beside the curves is of all rows, too
        loss = get(client, "/api/run", run=key_of(run))["learning"][0]
        if loss["high"] == 99:
            break
        wait_for_all.wait(0.05)
    assert (loss["name"], loss["high"]) == ("train/loss", 99)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 50))
def test_decimation_keeps_mean_and_extremes(values: list[float], points: int) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, float(step), value)
    found = decimated(series, points)
    assert len(found.steps) <= points and sum(found.counts) == len(values)
    if values:
        assert (min(found.lows), max(found.highs), found.steps[-1]) == (
            min(values), max(values), len(values) - 1,
        )  # fmt: skip
        mean = sum(m * c for m, c in zip(found.means, found.counts, strict=True)) / len(values)
        assert mean == pytest.approx(sum(values) / len(values), abs=1e-3)


def test_samples_are_counted_over_restarts_and_numbers_of_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, log_points=4)
    rows = metric_rows.MetricRows(run)
    began = time.time() + 10
    rows.worlds = [(0.0, 2), (began, 4)]
    again = []
    for number in (1, 2):  # resumed from step 20 on four ranks, whose counters begin again
        again.append(row(20 + 10 * number, 0, began + number))
        again[-1]["data"]["train"]["samples"] = 64 * 10 * number
    with run.metrics_file(0).open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in again))
    rows.refresh()
    assert rows.samples.steps == [10, 20, 30, 40]
    assert rows.samples.highs == [1280, 2560, 2560 + 2560, 2560 + 5120]


def test_open_runs_stay_within_a_budget(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, log_points=3) for _ in range(5)]
    library = RunLibrary(root=tmp_path, budget_bytes=3 << 20)
    for run in [*runs, runs[0]]:
        opened = library.open(key_of(run))
        assert opened is not None and opened.refresh().header.step == 30
        assert len(library._open) <= 2
    assert [*library._open][-1] == key_of(runs[0])
    assert library.open("none") is None


ODD_HISTOGRAMS = (
    '{"edges": [0, 1e999], "counts": [1]}',
    *(
        f'{{"edges": [0, 1], "counts": [1], "non_finite": {odd}}}'
        for odd in ('"x"', "null", "1e999", "[1]", "-1")
    ),
    f'{{"edges": [0, 1{"0" * 400}], "counts": [1]}}',
    '{"edges": [0, 1], "counts": ["1"]}',
    '{"edges": {}, "counts": 1}',
    "[1]",
    "[" * 100_000,
)


def test_media_are_pictures_or_text_and_inside_the_run(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = make_run(root)
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\n" + SECRET.encode())
    files = run.media_files_dir(0)
    files.mkdir(parents=True)
    (files / "good.png").write_bytes(b"\x89PNG\r\n\x1a\nxyz")
    (files / "fake.png").write_text("<html><script>alert(1)</script>")
    (files / "page.txt").write_text("<script>alert(1)</script>\x1b[31m")
    (files / "link.png").symlink_to(tmp_path / "secret.png")
    (files / "other.txt").symlink_to(tmp_path / "secret.png")
    for number, odd in enumerate(ODD_HISTOGRAMS):
        (files / f"{number}.json").write_text(odd)
    base = {
        "time": 1.0,
        "attempt": 1,
        "step": 5,
        "stage": "fit",
        "epoch": 0,
        "number": 0,
        "bytes": 1,
        "name": "<b>",
    }
    kinds = {"png": "image", "txt": "text", "json": "histogram"}
    names = [*(path.name for path in files.iterdir()), "../../../../secret.png", "gone.png"]
    rows = [base | {"kind": kinds[name.rpartition(".")[2]], "file": f"rank-00000/{name}"} for name in names]
    write_rows(run.media_index_file(0), rows)
    with client_of(RunLibrary(root=root)) as client:

        def fetch(name: str) -> Any:
            return client.get("/api/media/file", params={"run": key_of(run), "file": name})

        good = fetch("rank-00000/good.png")
        assert (good.status_code, good.headers["content-type"]) == (200, "image/png")
        text = fetch("rank-00000/page.txt")
        assert text.headers["content-type"] == "application/json"
        assert text.json() == {"text": "<script>alert(1)</script>"}
        bad = (
            "fake.png",
            "link.png",
            "other.txt",
            "gone.png",
            *(f"{number}.json" for number in range(len(ODD_HISTOGRAMS))),
            "../../../../secret.png",
            "none.png",
        )
        for name in (*(f"rank-00000/{each}" for each in bad), "../run.json", "/etc/passwd", ""):
            assert fetch(name).status_code == 404, name
        page = get(client, "/api/media", run=key_of(run))
        assert page["names"] == ["<b>"] and page["count"] == 6 + len(ODD_HISTOGRAMS)
        assert get(client, "/api/media", run=key_of(run), search="none")["items"] == []
        run.media_index_file(0).rename(tmp_path / "index.jsonl")
        run.media_index_file(0).symlink_to(tmp_path / "index.jsonl")
        linked = get(client, "/api/media", run=key_of(run))
        assert linked["count"] == 0 and "is not a regular file" in linked["note"]
        assert fetch("rank-00000/good.png").status_code == 404


def test_of_a_long_index_the_newest_media_are_shown_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    base = {"time": 1.0, "attempt": 1, "stage": "fit", "epoch": 0, "number": 0, "name": "x", "kind": "image"}

    def log(*steps: int, size: int = 1) -> None:
        rows = [base | {"step": n, "file": f"rank-00000/x/{n}.png", "bytes": size} for n in steps]
        with run.media_index_file(0).open("a") as index:
            index.writelines(f"{json.dumps(row)}\n" for row in rows)

    run.media_files_dir(0).mkdir(parents=True)
    log(*range(100))
    row_bytes = run.media_index_file(0).stat().st_size // 100
    monkeypatch.setattr(media, "_INDEX_BYTES", 20 * row_bytes)
    with client_of(RunLibrary(root=tmp_path)) as client:

        def steps() -> list[int]:
            found = get(client, "/api/media", run=key_of(run))
            assert "the newest part of a long index" in found["note"]
            return [item["step"] for item in found["items"]]

        assert steps() == list(range(99, 80, -1)), "and a part of a row, which is none"
        log(100)
        assert steps() == list(range(100, 80, -1))
        log(*range(101, 140))
        assert steps() == list(range(139, 120, -1)), "what it keeps stays bounded"
        log(140, size=40 << 20)
        newest, *others = get(client, "/api/media", run=key_of(run))["items"]
        assert newest["too_large"] and not any(item["too_large"] for item in others)


def test_media_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long index is read, the run is shown; a file is found without a look at all others."""
    run = make_run(tmp_path)
    (run.media_files_dir(0) / "x").mkdir(parents=True)
    (run.media_files_dir(0) / "x" / "1.txt").write_text("words")
    base = {"time": 1.0, "attempt": 1, "stage": "fit", "epoch": 0, "number": 0, "name": "x", "kind": "text"}
    write_rows(run.media_index_file(0), [base | {"step": 1, "file": "rank-00000/x/1.txt", "bytes": 5}])
    opened = RunLibrary(root=tmp_path).open(key_of(run))
    assert opened is not None
    refresh, shown = MediaIndex.refresh, threading.Event()

    def read_slowly(index: MediaIndex) -> bool:
        other = threading.Thread(target=lambda: opened.refresh() and shown.set(), daemon=True)
        other.start()
        assert shown.wait(60), "who looks at the run waits for its media"
        return refresh(index)

    before = opened.size_bytes
    monkeypatch.setattr(MediaIndex, "refresh", read_slowly)
    assert opened.media_page("", "")["count"] == 1
    assert opened.size_bytes > before, "media count in the budget of memory"
    monkeypatch.setattr(MediaIndex, "refresh", refresh)
    monkeypatch.setattr(MediaIndex, "items", lambda *_: pytest.fail("all items are looked at"))
    assert opened.media_content("rank-00000/x/1.txt") == {"text": "words"}
    assert opened.media_content("rank-00000/x/1.png") is None


# --- who may ask


def test_without_the_token_nothing_is_answered(tmp_path: Path) -> None:
    make_run(tmp_path)
    library = RunLibrary(root=tmp_path)
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "ü"):
        with client_of(library, token="") as client:
            header = {"cookie": f"headway={token}".encode()} if token else {}
            for path in ("/", "/static/style.css", "/api/live", *ADDRESSES, "/none"):
                answer = client.get(path, headers=header)
                assert (answer.status_code, "set-cookie" in answer.headers) == (401, False), (token, path)
                assert "headway web" in answer.text and "synthetic" not in answer.text
            assert client.get("/", params={"token": token}).status_code == 401
            assert client.get(f"/?token={TOKEN}&token={token}").status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    with client_of(RunLibrary(root=tmp_path), token="") as client:
        answer = client.get(f"{BASE}//evil.example/", params={"token": TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        parts = {part.strip() for part in answer.headers["set-cookie"].split(";")}
        assert parts == {f"headway={TOKEN}", "Path=/", "HttpOnly", "SameSite=Lax"}
        assert client.get("/").status_code == 200, "the cookie opens the page"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "127.0.0.1@evil:80", ""]
)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


def test_a_tunnel_may_end_at_another_port(client: TestClient) -> None:
    for host in ("localhost:9000", "127.0.0.1:1", "localhost"):
        assert (
            client.get("/api/runs", headers={"host": host, "cookie": f"headway={TOKEN}"}).status_code == 200
        )


def test_only_reading_is_allowed_and_only_from_the_page_itself(client: TestClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"):
        for path in ("/api/runs", "/none"):
            assert client.request(method, path).status_code == 405
    assert client.head("/api/runs").status_code == 200
    for site, mode, status in (
        ("cross-site", "no-cors", 403), ("same-site", "cors", 403), ("same-origin", "cors", 200),
        ("none", "navigate", 200), ("cross-site", "navigate", 200),
    ):  # fmt: skip
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
        assert client.get("/api/runs", headers=headers).status_code == status


def test_browsers_are_bound_by_every_answer(client: TestClient) -> None:
    for path in ("/", "/static/style.css", "/api/runs", "/none"):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert (
            headers["cache-control"] == "no-store"
            and headers["cross-origin-resource-policy"] == "same-origin"
        )


def test_a_user_without_a_name_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under docker run -u 1234."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    address = listen()
    with address.listener:
        assert f" {os.getuid()}@" in address.ssh_command()


def test_it_listens_on_this_machine_only_and_prints_the_tunnel() -> None:
    address = listen()
    other = listen()
    try:
        host, port = address.listener.getsockname()
        assert host == "127.0.0.1" and address.port == port
        assert address.url("a <b>") == f"http://127.0.0.1:{port}/?token={address.token}#/run/a%20%3Cb%3E"
        assert address.ssh_command().startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        assert (
            len(address.token) >= 40 and address.token != other.token and address.token not in repr(address)
        )
    finally:
        address.listener.close()
        other.listener.close()


def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = listen()
    try:
        for argv, words in (
            (["web", str(tmp_path / "none")], "matches no run"),
            (["web", "--root", str(tmp_path / "none")], "there is no directory"),
            (["web", str(tmp_path), "--port", "70000"], "is not a valid port"),
            (["web", str(tmp_path), "--port", str(taken.port)], "cannot be used"),
        ):
            assert main(argv) == 2 and words in (error := capsys.readouterr().err) and error.count("\n") == 1
    finally:
        taken.listener.close()
    monkeypatch.setattr("headway.watch.web.server.find_spec", {"starlette": 1}.get)
    assert main(["web", str(tmp_path)]) == 2
    needed = "headway: starlette is needed to show runs in a browser: pip install 'headway[web]'\n"
    assert capsys.readouterr() == ("", needed)


# --- attacks


def test_the_id_of_a_run_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.cli.web.serve", lambda address, _: address.listener.close())
    run = make_run(tmp_path)
    info = run.info()
    run.info_file.write_text(json.dumps(info | {"id": f"{info['name']}-\x1b]0;owned\x07\x1b[2J"}))
    assert main(["web", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "owned" in shown and not any(c in shown for c in "\x1b\x07")


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/%2e%2e/cli/web.py", "/static//etc/passwd", "/static/",
     "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/uplot/../../app.py", "/static/style.css%00.js"],
)  # fmt: skip
def test_paths_lead_nowhere(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_runs_outside_the_root_are_not_runs(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    secret, run = make_run(outside), make_run(root)
    (root / "linked").symlink_to(secret.path)
    with client_of(RunLibrary(root=root)) as client:
        assert [each["key"] for each in get(client, "/api/runs")] == [key_of(run)]
        for key in ("linked", "..", ".", "", f"../outside/{key_of(secret)}", str(secret.path), "/", "\x00"):
            for path in ("/api/live", *ADDRESSES[1:]):
                assert client.get(path, params={"run": key}).status_code == 404, (path, key)


TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["..", "../../etc/passwd", "-1", "1e9", "9" * 30, "\x00", "<script>", "0"]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(ADDRESSES) | TEXT.map(lambda text: "/" + quote(text.encode("utf-8", "surrogatepass"))),
    query=st.lists(
        st.tuples(
            st.sampled_from(["run", "metric", "points", "from", "to", "what", "name", "end", "search"]) | TEXT, TEXT
        ),
        max_size=6,
    ),
    headers=st.dictionaries(
        st.sampled_from(["host", "cookie", "sec-fetch-site", "accept", "range", "x-forwarded-host", "upgrade"]),
        st.binary(max_size=40).map(lambda value: bytes(each for each in value if each not in b"\r\n\x00")),
        max_size=3,
    ),
    real=st.booleans(),
)  # fmt: skip
def test_any_request_gets_an_answer(
    fuzzed: tuple[TestClient, str],
    path: str,
    query: list[tuple[str, str]],
    headers: dict[str, bytes],
    real: bool,
) -> None:
    client, key = fuzzed
    pairs = [("run", key), *(pair for pair in query if pair[0] != "run")] if real else query
    answer = client.get(f"{path}?{urlencode(pairs, errors='surrogatepass')}", headers=headers)
    assert answer.status_code in (200, 303, 400, 401, 403, 404, 414, 421), answer.text
    assert b"root:x:0" not in answer.content and answer.headers["x-content-type-options"] == "nosniff"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str]]:
    root = tmp_path_factory.mktemp("fuzzed")
    run = make_run(root, log_points=3)
    run.log_file(0).write_text("a line\n")
    with client_of(RunLibrary(root=root)) as client:
        yield client, key_of(run)


def make_hostile(root: Path) -> Run:
    """A run whose files are as bad as somebody can make them who may write to the root."""
    run = make_run(root, ranks=2, log_points=3)
    bad = root / "<img src=x onerror=alert(1)>"
    run.path.rename(bad)
    run = Run(path=bad, id=run.id, name=run.name)
    secret = root.parent / "secret.txt"
    secret.write_text(f"{SECRET}\n")
    (root.parent / "secret.yaml").write_text(f"password: {SECRET}\n")
    run.config_file.unlink()
    run.config_file.symlink_to(root.parent / "secret.yaml")
    run.log_file(0).symlink_to(secret)
    os.mkfifo(run.log_file(1))
    run.log_file(2).mkdir()
    run.log_file(3).write_bytes(random.Random(0).randbytes(300_000))
    run.log_file(4).write_text("x" * 3_000_000)
    run.log_file(5).write_text("<script>alert(1)</script>\x1b[2J\u202e\n")
    run.diagnostics_file.write_text("[" * 100_000)
    run.plan_file.write_text('{"answers": {"time.step": {"value": 1e999}}}')
    run.failure_file.symlink_to(secret)
    (run.code_dir / "uncommitted.diff").unlink(missing_ok=True)
    run.code_dir.mkdir(exist_ok=True)
    (run.code_dir / "uncommitted.diff").symlink_to(secret)
    evil = {"nan": "nan", "huge": 10**400, "n": 1e308} | {
        f"<b onclick=x>{number}": number for number in range(600)
    }
    with run.metrics_file(0).open("ab") as file:
        file.write(random.Random(1).randbytes(100_000) + b"\n" + b"[" * 100_000 + b"\n")
        file.write(
            json.dumps(row(40, 0, time.time()) | {"metrics": evil, "stage": "<script>"}).encode() + b"\n"
        )
        file.write(
            json.dumps(row(10**14, 0, time.time()) | {"data": {"<i>": {"samples": 10**14}}}).encode() + b"\n"
        )
        file.write(b'{"kind": "train", "step": 50, "time": 1, "pad": "' + b"x" * (1 << 20) + b'"}\n')
    return run


def test_a_hostile_run_directory_is_shown_as_far_as_it_is_sane(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = make_hostile(root)
    bomb = make_run(root, log_points=2)
    tree = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))
    bomb.config_file.write_text(f"a0: &a0 [x, x]\n{tree}\n")
    deep = make_run(root, log_points=2)
    deep.config_file.write_text("a: " + "[" * 50_000)
    broken = make_run(root, log_points=2)
    broken.info_file.write_text('{"format": 1}')
    with client_of(RunLibrary(root=root)) as client:
        listed = {each["key"]: each for each in get(client, "/api/runs")}
        assert set(listed) == {key_of(run), key_of(bomb), key_of(deep)}
        assert listed[key_of(run)]["settings"] == {} and listed[key_of(run)]["key"].startswith("<img")
        texts = [json.dumps(listed)]
        for each in (run, bomb, deep):
            for path in ADDRESSES[1:]:
                texts.append(client.get(path, params={"run": key_of(each), "metric": "huge"}).text)
        for name in range(7):
            answer = client.get("/api/log", params={"run": key_of(run), "name": str(name)})
            assert answer.status_code == (404 if name == 6 else 200)
            texts.append(answer.text)
            texts.append(
                client.get("/api/log", params={"run": key_of(run), "name": name, "search": "e"}).text
            )
        shown = get(client, "/api/run", run=key_of(run))
        assert shown["header"]["step"] == 10**14 and len(shown["learning"]) <= 400
    assert not [text for text in texts if SECRET in text or "Internal Server Error" in text]
    assert max(map(len, texts)) < 2_000_000, "each answer is bounded"


def test_no_more_streams_are_open_than_allowed(tmp_path: Path) -> None:
    """All ask at once, as the pages of a browser that is opened again do; who leaves makes place."""
    app = make_app(RunLibrary(runs=[make_run(tmp_path)]), token=TOKEN)
    headers = [(b"host", b"127.0.0.1"), (b"cookie", b"headway=" + TOKEN.encode())]
    scope = {"type": "http", "method": "GET", "path": "/api/live", "query_string": b"", "headers": headers}

    async def ask(statuses: list[int], answered: asyncio.Event, close: asyncio.Event) -> None:
        async def receive() -> dict[str, Any]:
            await close.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                if len(statuses) == 60:
                    answered.set()

        await app(dict(scope), receive, send)

    async def ask_often() -> list[list[int]]:
        rounds = []
        for _ in range(2):
            statuses, answered, close = list[int](), asyncio.Event(), asyncio.Event()
            asking = [asyncio.ensure_future(ask(statuses, answered, close)) for _ in range(60)]
            await asyncio.wait_for(answered.wait(), 100)
            close.set()
            await asyncio.gather(*asking)
            rounds.append(sorted(statuses))
        return rounds

    assert asyncio.run(ask_often()) == [[200] * 32 + [503] * 28] * 2


def test_the_page_is_shipped_with_the_licence_of_what_it_uses() -> None:
    static = Path(assets.__wrapped__.__code__.co_filename).parent / "static"
    assert "MIT" in (static / "uplot" / "LICENSE").read_text()
    version = (static / "uplot" / "README.md").read_text().split()[1]
    assert f"(v{version.rstrip(',')})" in (static / "uplot" / "uplot.min.js").read_text()[:100]
    for path in static.glob("*.*"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path.name
        assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", ""), (
            path.name
        )
        assert "https://" not in text and " style=" not in text and "onclick=" not in text, path.name


def test_connections_without_a_request_lock_nobody_out_and_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "_REQUEST_S", 0.5)
    address = web_server.listen()
    server = uvicorn.Server(web_server.make_config(address, RunLibrary(runs=[make_run(tmp_path)])))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listener]}, daemon=True)
    thread.start()
    idle = [socket.create_connection(("127.0.0.1", address.port), timeout=60) for _ in range(140)]
    with socket.create_connection(("127.0.0.1", address.port), timeout=60) as owner:
        owner.sendall(f"GET /?token={address.token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert owner.recv(12) == b"HTTP/1.1 303"
    for each in idle:
        assert each.recv(1) == b"", "it is closed"
        each.close()
    server.should_exit = True
    thread.join(60)


def test_a_connection_that_is_refused_is_closed(tmp_path: Path) -> None:
    """Else half of another request on it would keep it open for ever, and a thousand of them lock the user out."""
    address = web_server.listen()
    server = uvicorn.Server(web_server.make_config(address, RunLibrary(runs=[make_run(tmp_path)])))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listener]}, daemon=True)
    thread.start()
    for request in ("GET /?token=wrong HTTP/1.1\r\n", "POST / HTTP/1.1\r\nContent-Length: 9\r\n"):
        with socket.create_connection(("127.0.0.1", address.port), timeout=60) as other:
            other.sendall(f"{request}Host: 127.0.0.1\r\n\r\n".encode())
            assert other.recv(9) == b"HTTP/1.1 "
            other.settimeout(10)
            with contextlib.suppress(OSError):  # it is closed already
                other.sendall(b"G")
            with contextlib.suppress(ConnectionResetError):
                while other.recv(1 << 16):
                    pass
    server.should_exit = True
    thread.join(60)
