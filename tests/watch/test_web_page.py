"""The page of `headway web`, in a real browser, on real runs: what people see and can do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import warm
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    Route,
    TimeoutError,
    expect,
    sync_playwright,
)
from synthetic_run import make_run, row, write_rows
from waiting import exit_in_time, wait_until

from headway.run import Run

LIMIT_MS = 60_000
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import headway as hw

HERE = Path(__file__).parent

class Fit(hw.TrainValStage):
    def step(self, batch):
        if hw.rank() == 1 and (HERE / "fail").exists():
            raise ValueError("the step is <b>cursed</b>")
        time.sleep(0.1)
        return self.models["net"](batch[0]).square().mean()

hw.init(device="cpu")
if hw.rank() == 1:
    (HERE / "rank-1.pid").write_text(str(os.getpid()))
hw.seed(0)
pipe = hw.Pipeline(config={"lr": 0.01}, name="real")
pipe.register_model("net", torch.nn.Linear(4, 1))
pipe.register_optimizer("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.01), model="net")
pipe.register_dataset("train", hw.data.DataLoader(TensorDataset(torch.randn(4000, 4)), 2))
pipe.append_stage(Fit(log_every=2), max_epochs=100)
pipe.enable_checkpointing(HERE / "runs", every=10)
pipe.run()
"""


@dataclass
class Site:
    """A server that shows a root of runs, a browser, and what the browser has done and said."""

    directory: Path
    root: Path
    base: str
    url: str
    browser: Browser
    runs: dict[str, Run]
    context: BrowserContext
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def listen(self, context: BrowserContext) -> BrowserContext:
        """Notes every request, and everything that the console says."""
        context.set_default_timeout(LIMIT_MS)
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("console", self._note)
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        return context

    def _note(self, message: ConsoleMessage) -> None:
        # a cluster of another test adds its network while a request is under way: the page asks again
        if "net::ERR_NETWORK_CHANGED" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(self.base)]


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    program = find_browser()
    if program is None:
        reason = "there is no Chromium (scripts/install-services.sh installs it)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"the tests of the page must run here, but {reason}", pytrace=False)
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("web")
    root = directory / "runs"
    runs = make_runs(root)
    command = [sys.executable, "-m", "headway", "web", str(root), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())
        base = f"http://127.0.0.1:{address['port']}"
        nowhere = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        expect.set_options(timeout=LIMIT_MS)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", nowhere])
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
            found = Site(directory, root, base, address["url"], browser, runs, context)
            found.listen(context)
            page = context.new_page()
            open_page(page, found.url)
            assert page.url == f"{base}/", "the token has left the address"
            page.close()
            yield found
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        exit_in_time(server)
    assert server.returncode == 0, "Ctrl-C is how one leaves"


@pytest.fixture
def page(site: Site) -> Iterator[Page]:
    """A new tab; whatever a test does there, the console stays silent and nothing is asked elsewhere."""
    site.requests.clear()
    site.complaints.clear()
    tab = site.context.new_page()
    yield tab
    tab.close()
    assert site.complaints == [] and site.outside == [] and site.requests


def make_runs(root: Path) -> dict[str, Run]:
    """A sweep of four runs, one of whose validations are known; a hostile one; one with media; one with a plan."""
    found: dict[str, Run] = {}
    for number, (lr, seed) in enumerate(((0.1, 1), (0.1, 2), (0.3, 1), (0.3, 2))):
        run = found[f"sweep{number}"] = make_run(root, ranks=4, log_points=60, slow_rank=2)
        run.config_file.write_text(f"lr: {lr}\nseed: {seed}\nmodel: {{depth: 12}}\n")
        member = {"sweep": found["sweep0"].id, "index": number, "size": 4, "settings": {}}
        run.sweep_file.write_text(json.dumps(member))
        rows = [row(10 * at, 0, time.time() - 60 + at) for at in range(1, 61)]
        for at, each in enumerate(rows):
            each["metrics"] = {"train/loss": lr + 10 / (at + 1) + (5 if at == 30 else 0), "val/accuracy": lr}
            each["metrics"]["train/gap"] = "nan" if number == 3 else lr
        write_rows(run.metrics_file(0), rows)
        run.log_file(0).write_text("".join(f"line {at}\n" for at in range(300)) + "WARNING: <i>hot</i>\n")
        write_rows(run.diagnostics_file, [{"host": "cn7", "torch": "2.13"}])
        run.end_attempt(1, status="done", exit_code=0)
    found["hostile"] = hostile = make_run(root, log_points=3)
    info = json.loads(hostile.info_file.read_text())
    name = "<script>hacked=1</script><img src=x onerror=hacked=1>"
    hostile.info_file.write_text(json.dumps(info | {"name": name, "id": f"{name}-x"}))
    hostile.config_file.write_text("'<b onclick=hacked=1>k</b>': '<img src=x onerror=hacked=1>'\n")
    bad = row(40, 0, time.time()) | {"metrics": {"<img src=x onerror=hacked=1>": 1.0}, "stage": "<u>x</u>"}
    with hostile.metrics_file(0).open("a") as file:
        file.write(json.dumps(bad) + "\n")
    warning = {"time": time.time(), "kind": "warning", "rank": 0, "text": "<script>hacked=1</script>"}
    with hostile.events_file(0).open("a") as file:
        file.write(json.dumps(warning) + "\n")
    add_media(found["sweep0"])
    found["late"] = late = make_run(root, log_points=60)
    late.config_file.write_text("lr: 0.1\n")
    rows = [row(10 * at, 0, time.time() - 60 + at) for at in range(1, 61)]
    validations = [each | {"kind": "validation", "metrics": {"val/loss": 2.0}} for each in rows[29::5]]
    write_rows(late.metrics_file(0), sorted([*rows, *validations], key=lambda each: each["step"]))
    late.plan_file.write_text(json.dumps({"answers": {"time.step": {"value": 0.08}}}))
    late.end_attempt(1, status="done", exit_code=0)
    return found


def add_media(run: Run) -> None:
    """An image, a histogram and a text, and an image that is too large."""
    files = run.media_files_dir(0)
    files.mkdir(parents=True)
    (files / "a.png").write_bytes(png(24, 16))
    (files / "b.json").write_text(json.dumps({"edges": [0, 1, 2], "counts": [3, 4], "non_finite": 0}))
    (files / "c.txt").write_text("a <b>bold</b> text")
    base = {
        "time": 1.0,
        "attempt": 1,
        "rank": 0,
        "step": 100,
        "stage": "fit",
        "epoch": 0,
        "number": 0,
        "bytes": 1,
    }
    items = (("image", "a.png", "samples"), ("histogram", "b.json", "weights"), ("text", "c.txt", "words"))
    rows = [base | {"kind": kind, "file": f"rank-00000/{file}", "name": name} for kind, file, name in items]
    large = {"kind": "image", "file": "rank-00000/d.png", "name": "scans", "bytes": 40 << 20}
    write_rows(run.media_index_file(0), [*rows, base | large])


def png(width: int, height: int) -> bytes:
    """A black picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\0" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def show(site: Site, page: Page, place: str) -> None:
    open_page(page, f"{site.base}/{place}")


def open_page(page: Page, address: str) -> None:
    """Goes to an address, again where the page itself did not come for the reason below."""
    for last in (False, False, False, False, True):
        try:
            page.goto(address)
            break
        except Error as error:
            if last or "net::ERR_NETWORK_CHANGED" not in str(error):
                raise
    reload_unless_started(page)


def reload_unless_started(page: Page) -> None:
    """Loads a page again whose scripts did not come: a cluster of another test has added its network meanwhile, and a
    browser then gives up all that it is loading."""
    # not `wait_for_function`: what it evaluates while it waits, the policy of the page forbids
    started = page.locator("html[data-theme]")
    for _ in range(5):
        try:
            started.wait_for(state="attached", timeout=LIMIT_MS / 4)
            return
        except TimeoutError:
            with suppress(Error):  # of the same kind: it is looked at again
                page.reload()
    started.wait_for(state="attached")


def run_place(run: Run, tab: str = "") -> str:
    return f"#/run/{quote(run.path.name, safe='')}" + (f"/{tab}" if tab else "")


COUNT_COLOR = """(canvas, [r, g, b]) => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    const far = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
    if (data[at + 3] > 200 && far < 30) count += 1;
  }
  return count;
}"""
BLUE, AMBER = [0x3B, 0x82, 0xF6], [0xF5, 0x9E, 0x0B]


def drawn(page: Page, panel: str, color: list[int]) -> Callable[[], int]:
    """How many points of a color a panel has."""
    canvas = page.locator(f'[data-metric="{panel}"] canvas')
    return lambda: int(canvas.evaluate(COUNT_COLOR, color)) if canvas.count() == 1 else 0


# --- live


def start(site: Site) -> subprocess.Popen[Any]:
    script = site.directory / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "headway", "run", "--nproc", "2", str(script)]
    output = (site.directory / "output.txt").open("w")
    with output:
        return warm.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=site.directory)


def test_a_real_run_is_followed_until_a_rank_is_killed_and_when_it_fails(site: Site, page: Page) -> None:
    show(site, page, "")
    process = start(site)
    try:
        link = page.locator("tr", has_text="real-").locator("a")
        expect(link).to_be_visible(timeout=LIMIT_MS)  # it appears in the list by itself
        link.click()
        step = page.locator(".progress b")
        expect(page.locator(".header .pill.running")).to_be_visible(timeout=LIMIT_MS)  # not one of the list
        reads = lambda: int("".join(filter(str.isdigit, step.inner_text().split(" of ")[0])) or 0)  # noqa: E731
        first = wait_until(reads, "the page shows a step")
        marker = page.evaluate("window.marker = Math.random()")
        wait_until(lambda: reads() > first + 4, "the page shows later steps")
        wait_until(drawn(page, "loss", BLUE), "the curve is drawn")
        assert page.evaluate("window.marker") == marker, "without being loaded again"
        assert page.locator(".failure").is_hidden()
        os.kill(int((site.directory / "rank-1.pid").read_text()), signal.SIGKILL)
        expect(page.locator(".failure h2")).to_contain_text("rank 1", timeout=LIMIT_MS)
        expect(page.locator(".failure")).to_contain_text("SIGKILL")
        expect(page.locator(".header .pill.failed")).to_be_visible(timeout=LIMIT_MS)
        exit_in_time(process)
        process = start(site)  # the same run resumes
        expect(page.locator(".header .pill.running")).to_be_visible(timeout=LIMIT_MS)
        expect(page.locator(".failure")).to_be_hidden()
        (site.directory / "fail").touch()
        expect(page.locator(".failure pre")).to_contain_text("Traceback", timeout=LIMIT_MS)
        expect(page.locator(".failure pre")).to_contain_text("ValueError: the step is <b>cursed</b>")
        box = page.locator(".failure").bounding_box()
        assert box is not None and box["y"] < 100, "pinned on top"
        exit_in_time(process)
    finally:
        process.kill()
        process.wait()
        print((site.directory / "output.txt").read_text())  # what the ranks said, if this fails


# --- one run


def test_curves_are_zoomed_smoothed_and_drawn_on_other_axes(site: Site, page: Page) -> None:
    show(site, page, run_place(site.runs["sweep0"]))
    wait_until(drawn(page, "loss", BLUE), "the curve is drawn")
    over = page.locator('[data-metric="loss"] .u-over')
    box = over.bounding_box()
    assert box is not None
    with page.expect_response(lambda answer: "from=" in answer.url) as asked:
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        page.mouse.up()
    (loss, *_) = [each for each in asked.value.json()["curves"] if each["name"] == "train/loss"]
    assert min(loss["step"]) >= 150 and max(loss["step"]) <= 320 and 10 <= len(loss["step"]) < 20
    page.get_by_role("button", name="reset zoom").click()
    expect(page.get_by_role("button", name="reset zoom")).to_be_hidden()
    page.get_by_label("log scale").check()
    page.get_by_label("smoothing").fill("0.95")
    for axis in ("time", "samples", "step"):
        page.get_by_label("x axis").select_option(axis)
        over.hover()
        expect(page.locator('[data-metric="loss"] figcaption')).to_contain_text(axis)
        assert drawn(page, "loss", BLUE)() > 100
    page.get_by_placeholder("find a metric").fill("accur")
    expect(page.locator(".panel")).to_have_count(1)


LEFTMOST = """(canvas, [r, g, b]) => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  let left = canvas.width;
  for (let at = 0; at < data.length; at += 4) {
    const far = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
    if (data[at + 3] > 200 && far < 30) left = Math.min(left, (at / 4) % canvas.width);
  }
  return left / canvas.width;
}"""


def test_curves_share_the_axis_of_time_and_the_plan_is_beside_the_speed(site: Site, page: Page) -> None:
    """Its validations begin in the middle of the run, which makes ten steps in a second where 12.5 were planned."""
    show(site, page, run_place(site.runs["late"]))
    expect(page.locator(".tile", has_text="of planned speed")).to_contain_text("80%")
    axis = page.get_by_label("x axis")
    axis.select_option("time")
    canvas = page.locator('[data-metric="loss"] canvas')
    wait_until(lambda: drawn(page, "loss", AMBER)() > 50, "the validations are drawn")
    begins = [canvas.evaluate(LEFTMOST, color) for color in (BLUE, AMBER)]
    axis.select_option("step")  # it is remembered
    assert begins[0] < 0.3 and begins[1] > 0.45, begins


def test_the_tabs_show_ranks_settings_diagnostics_logs_and_media(site: Site, page: Page) -> None:
    run, other = site.runs["sweep0"], site.runs["sweep3"]
    show(site, page, run_place(run, "speed"))
    canvas = page.locator("canvas[role=img]")
    wait_until(lambda: canvas.evaluate("each => each.width") > 150, "the heat map is drawn")
    expect(page.get_by_label("colors", exact=True)).to_have_text("1×1.3×2×")
    assert canvas.evaluate(COUNT_COLOR, [0xEE, 0x2B, 0x2B]) > 50, "rank 2 is twice as slow, and red"
    expect(page.locator(".tab .uplot")).to_be_visible()
    expect(page.locator(".tab table")).to_contain_text("straggler")
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("compare with").select_option(other.path.name)
    page.get_by_label("only what differs").check()
    expect(page.locator(".tab table tbody tr")).to_have_text(["lr0.10.3", "seed12"])
    page.get_by_role("tab", name="Diagnostics").click()
    page.get_by_placeholder("find", exact=True).fill(
        "TORCH"
    )  # not "find a setting", which is there until the tab changes
    expect(page.locator(".tab mark")).to_have_text("torch")
    page.get_by_role("tab", name="Log").click()
    expect(page.locator(".log")).to_contain_text("line 299")
    page.get_by_placeholder("find in the log").fill("hot")
    expect(page.locator(".log")).to_have_text("WARNING: <i>hot</i>")
    page.get_by_role("tab", name="Media").click()
    page.get_by_placeholder("find in names").fill("s")
    expect(page.locator(".media figure")).to_have_count(4)
    image = page.locator(".media img")
    wait_until(lambda: image.evaluate("each => each.naturalWidth") == 24, "the picture is shown")
    expect(page.locator(".media pre")).to_have_text("a <b>bold</b> text")
    expect(page.locator(".media .bar")).to_have_count(2)
    expect(page.locator(".media")).to_contain_text(
        "40 MiB are too large for this page: media/rank-00000/d.png in"
    )
    page.get_by_placeholder("find in names").fill("none of them")
    expect(page.locator(".media")).to_have_text("Nothing has that name, or that text in its name or caption.")


def fail_first(page: Page, part: str, count: int = 1) -> None:
    """Makes the first requests of an address fail, as they do in a browser whose machine changes its network."""
    left = iter(range(count))

    def answer(route: Route) -> None:
        if next(left, None) is None:
            route.fallback()
        else:
            route.abort("connectionreset")

    page.route(f"**/api/{part}?*", answer)


def forgive_resets(site: Site) -> None:
    """Removes what the browser says about requests that `fail_first` has failed."""
    assert any("ERR_CONNECTION_RESET" in text for text in site.complaints), "a request has failed"
    site.complaints[:] = [text for text in site.complaints if "ERR_CONNECTION_RESET" not in text]


@pytest.mark.parametrize(
    ("tab", "part", "text"),
    [
        ("settings", "settings", "model.depth"),
        ("diagnostics", "diagnostics", "torch"),
        ("speed", "ranks", "1.3×"),
    ],
)
def test_a_tab_is_shown_although_the_first_request_for_it_fails(
    site: Site, page: Page, tab: str, part: str, text: str
) -> None:
    fail_first(page, part)
    show(site, page, run_place(site.runs["sweep0"], tab))
    expect(page.locator(".tab")).to_contain_text(text)
    forgive_resets(site)


def test_a_run_is_shown_although_the_first_request_for_it_fails(site: Site, page: Page) -> None:
    with page.expect_event("requestfailed"):
        fail_first(page, "run")
        show(site, page, run_place(site.runs["sweep0"]))
    expect(page.locator(".header h1")).to_be_visible()
    page.wait_for_timeout(500)
    expect(page.locator(".header h1")).to_be_visible()
    forgive_resets(site)


@pytest.mark.parametrize(("tab", "text"), [("log", "line 299"), ("media", "samples")])
def test_what_a_tab_shows_comes_back_when_the_server_answers_again(
    site: Site, page: Page, tab: str, text: str
) -> None:
    """Although the answer is the same as before."""
    show(site, page, run_place(site.runs["sweep0"], tab))
    body = page.locator(".tab .log, .tab .media")
    expect(body).to_contain_text(text)
    page.route(f"**/api/{tab}?*", lambda route: route.fulfill(status=500, body="broken"))
    search = page.get_by_placeholder("find in ")
    if tab == "media":  # a finished run does not ask by itself
        search.fill("nothing")
        expect(body).to_contain_text("broken")
        page.unroute_all()
        search.fill("")
    else:
        expect(body).to_contain_text("broken")
        page.unroute_all()
    expect(body).to_contain_text(text)
    site.complaints[:] = [each for each in site.complaints if "500" not in each]


def test_earlier_lines_of_a_log_come_once_however_often_they_are_asked_for(site: Site, page: Page) -> None:
    run = site.runs["late"]
    run.log_file(0).write_text("".join(f"line {at:06} {'.' * 80}\n" for at in range(1500)))
    show(site, page, run_place(run, "log"))
    body = page.locator(".log")
    expect(body).to_contain_text("line 001499")
    earlier = page.get_by_role("button", name="earlier lines")
    page.route("**/api/log?*end=*", lambda route: route.fulfill(status=500, json={"error": "broken"}))
    earlier.click()
    expect(page.locator(".controls")).to_contain_text("broken")
    expect(body).to_contain_text("line 001499")  # they stay, and so does the way to ask again
    page.unroute_all()
    site.complaints[:] = [each for each in site.complaints if "500" not in each]
    earlier.dblclick(no_wait_after=True)
    expect(body).to_contain_text("line 000200")
    page.wait_for_timeout(500)
    lines = [line for line in body.inner_text().splitlines() if line]
    assert lines == sorted(set(lines)), "in order, and none twice"


def test_the_answer_to_an_older_question_is_not_shown(site: Site, page: Page) -> None:
    """The first choice of another run takes longer than the second, and the colors of ranks than the next ones."""
    run, slow, fast = (site.runs[f"sweep{number}"] for number in (0, 1, 3))
    held: list[Route] = []
    page.route(f"**/api/settings?*{slow.path.name}*", lambda route: held.append(route))
    page.route("**/api/ranks?*what=data*", lambda route: held.append(route))
    show(site, page, run_place(run, "settings"))
    for other in (slow, fast):
        page.get_by_label("compare with").select_option(other.path.name)
    heads = page.locator(".tab table thead")
    expect(heads).to_contain_text(fast.path.name)
    wait_until(lambda: page.evaluate("1") and held, "the slow question is on its way")
    with page.expect_response(lambda answer: slow.path.name in answer.url):
        held.pop().continue_()
    page.wait_for_timeout(500)
    expect(heads).to_contain_text(fast.path.name)
    page.get_by_role("tab", name="Speed").click()
    colors = page.get_by_label("colors", exact=True)
    expect(colors).to_have_text("1×1.3×2×")
    for what in ("data", "own"):
        page.get_by_label("what the colors mean").select_option(what)
    wait_until(lambda: page.evaluate("1") and held, "the slow question is on its way")
    before = page.locator("canvas[role=img]").evaluate("each => each.toDataURL()")
    with page.expect_response(lambda answer: "what=data" in answer.url):
        held.pop().continue_()
    page.wait_for_timeout(500)
    assert page.locator("canvas[role=img]").evaluate("each => each.toDataURL()") == before


# --- several runs


def test_runs_are_filtered_sorted_and_overlaid(site: Site, page: Page) -> None:
    show(site, page, "")
    rows = page.locator(".runs tbody tr")
    names = [site.runs[f"sweep{number}"].path.name for number in range(4)]
    page.get_by_placeholder("filter").fill("lr>0.2 depth=12")
    expect(rows).to_have_count(2)
    assert {each.get_attribute("data-key") for each in rows.all()} == set(names[2:])
    page.get_by_placeholder("filter").fill("depth=12")
    expect(rows).to_have_count(4)
    page.get_by_label("sort").select_option("train/loss")
    expect(page.locator(".runs thead")).to_contain_text("lowest train/loss")
    assert {each.get_attribute("data-key") for each in rows.all()[:2]} == set(names[:2]), (
        "the lowest loss first"
    )
    expect(rows.first.locator(".spark polyline")).to_be_attached()
    for name in (names[0], names[2]):
        page.locator(f'[data-key="{name}"] input').check()
    page.get_by_role("link", name="overlay 2 runs").click()
    for color in (BLUE, AMBER):
        wait_until(lambda color=color: drawn(page, "loss", color)() > 100, "both curves are drawn")
    expect(page.locator('[data-metric="loss"] figcaption .item')).to_have_count(2)
    expect(page.locator("table tbody tr")).to_have_text(["lr0.10.3"])


def test_a_sweep_shows_a_metric_against_each_setting(site: Site, page: Page) -> None:
    show(site, page, "")
    page.get_by_role("link", name="sweep").click()
    expect(page.locator("[data-setting]")).to_have_count(2)
    for name in ("lr", "seed"):
        expect(page.locator(f'[data-setting="{name}"] circle')).to_have_count(4)
    assert page.get_by_label("metric").input_value() == "val/accuracy"
    best = page.locator("tr.best")
    expect(best).to_contain_text("0.3")
    places = [
        float(each.get_attribute("cx") or 0) for each in page.locator('[data-setting="lr"] circle').all()
    ]
    assert len(set(places)) == 2, "two values of lr, to the left and to the right"
    page.get_by_label("metric").select_option("train/loss")
    expect(best).to_contain_text("0.2667")  # 0.1 + 10 / 60
    page.get_by_label("metric").select_option("train/gap")
    expect(page.locator('[data-setting="lr"] circle')).to_have_count(3)
    missing = f"not drawn, for train/gap has no finite value: {site.runs['sweep3'].id}"
    expect(page.get_by_text(missing)).to_be_visible()
    page.locator("circle.first").first.click()
    expect(page.locator(".header h1")).to_be_visible()


@pytest.fixture
def large(site: Site) -> Iterator[Run]:
    """A run with many metrics of long names and a long log, which only its own tests see."""
    run = make_run(site.root)
    metrics = {f"train/{'layer' * 15}.{number:03d}": 1.0 for number in range(100)}
    write_rows(run.metrics_file(0), [row(10 * at, 0, time.time()) | {"metrics": metrics} for at in (1, 2, 3)])
    run.log_file(0).write_text("".join(f"line {number}\n" for number in range(5000)))
    run.end_attempt(1, status="done", exit_code=0)
    yield run
    shutil.rmtree(run.path)


def test_all_of_many_metrics_are_drawn_and_a_filter_without_a_match_leaves_nothing_behind(
    site: Site, page: Page, large: Run
) -> None:
    show(site, page, run_place(large))
    page.get_by_role("button", name="show all 100 panels").click()
    expect(page.locator(".panel figcaption .item")).to_have_count(100)
    wanted, nothing = page.get_by_placeholder("find a metric"), page.get_by_text("no metric has that name")
    wanted.fill("zzz")
    expect(nothing).to_be_visible()
    wanted.fill("")
    expect(page.locator(".panel")).to_have_count(100)
    expect(nothing).to_be_hidden()


def test_of_many_matches_in_a_log_the_page_says_how_many_are_shown(
    site: Site, page: Page, large: Run
) -> None:
    show(site, page, run_place(large, "log"))
    page.get_by_placeholder("find in the log").fill("line")
    expect(page.get_by_text("the newest 500 of 5,000 lines")).to_be_visible()


def test_a_run_without_a_finite_value_is_named_where_it_is_not_drawn(site: Site, page: Page) -> None:
    keys = "/".join(site.runs[name].path.name for name in ("sweep0", "sweep3"))
    show(site, page, f"#/compare/{quote(keys, safe='')}")
    expect(page.locator('[data-metric="gap"] figcaption')).to_contain_text("no finite value: synthetic ")


def test_tabs_in_the_background_leave_connections_to_the_one_that_is_seen(site: Site, page: Page) -> None:
    """A browser has six of them to a server."""
    hidden = [site.context.new_page() for _ in range(6)]
    for tab in hidden:
        tab.add_init_script(
            "Object.defineProperty(document, 'hidden', { get: () => window.isHidden ?? true })"
        )
        show(site, tab, "")
    show(site, page, run_place(site.runs["sweep0"]))
    wait_until(drawn(page, "loss", BLUE), "the curve is drawn")
    assert hidden[0].locator(".runs").count() == 0
    hidden[0].evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    expect(hidden[0].locator(".runs")).to_be_visible()
    for tab in hidden:
        tab.close()


# --- who writes the runs is not trusted


def test_markup_of_runs_is_text(site: Site, page: Page) -> None:
    hostile = site.runs["hostile"]
    show(site, page, "")
    expect(page.locator(".runs")).to_contain_text("<script>hacked=1</script><img src=x onerror=hacked=1>")
    for tab in ("", "speed", "settings", "diagnostics", "log", "media"):
        show(site, page, run_place(hostile, tab))
        expect(page.locator(".header h1")).to_contain_text(
            "<script>hacked=1</script><img src=x onerror=hacked=1>"
        )
        expect(page.locator(".messages")).to_contain_text("<script>hacked=1</script>")
        assert page.locator("main script, main img, main u, main [onclick]").count() == 0
    expect(page.locator(".tab")).to_contain_text("Nothing was logged")
    show(site, page, run_place(hostile, "settings"))
    expect(page.locator(".tab td code")).to_have_text("<b onclick=hacked=1>k</b>")
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.title().startswith("<script>")


def test_without_the_token_there_is_no_page(site: Site) -> None:
    stranger = site.browser.new_context()
    for place, status in (("/", 401), ("/?token=wrong", 401), ("/api/runs", 401), ("/static/app.js", 401)):
        assert stranger.request.get(f"{site.base}{place}").status == status
    stranger.close()
    for place in ("/static/..%2fapp.py", "/static/%2e%2e/%2e%2e/cli/web.py", "/..%2f..%2fetc/passwd"):
        assert site.context.request.get(f"{site.base}{place}").status == 404
    (cookie,) = site.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Lax"


def test_a_link_on_another_page_opens_it(site: Site) -> None:
    """Such as the address in a terminal of JupyterLab: the browser knows that another site has sent it here."""
    link = f'<a href="{site.url}">open</a>'
    for _ in range(3):  # a cluster of another test may add its network meanwhile: then the browser gives up
        stranger = site.browser.new_context()
        stranger.route(
            "http://jupyter.example/",
            lambda route: route.fulfill(body=link, content_type="text/html"),
        )
        tab = stranger.new_page()
        tab.goto("http://jupyter.example/")
        tab.get_by_role("link").click()
        try:
            expect(tab.locator("h1")).to_have_text("Runs", timeout=LIMIT_MS / 4)
        except AssertionError:
            text = tab.locator("body").inner_text()
        else:
            return
        finally:
            stranger.close()
    pytest.fail(text)


def test_what_is_asked_elsewhere_would_be_noticed(site: Site) -> None:
    tab = site.context.new_page()
    site.requests.clear()
    with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
        tab.goto("http://outside.example/")
    tab.close()
    assert site.outside == ["http://outside.example/"]


def test_it_fits_a_phone_and_is_dark_or_light(site: Site, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    color = "getComputedStyle(document.body).backgroundColor"
    for place in ("", run_place(site.runs["sweep0"]), run_place(site.runs["sweep0"], "speed")):
        show(site, page, place)
        expect(page.locator(".pill").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
    light = page.evaluate(color)
    page.locator("#theme").click()
    dark = page.evaluate(color)
    assert light == "rgb(247, 248, 250)" and dark == "rgb(15, 19, 24)"
    page.reload()
    reload_unless_started(page)
    assert page.evaluate(color) == dark, "it is remembered"
    page.locator("#theme").click()
