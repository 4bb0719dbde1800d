"""The report of a run as one HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from headway import __version__
from headway.plan.report.saved_plan import PlanComparison
from headway.run import Run
from headway.system import files
from headway.system.text import format_bytes, format_duration, plural
from headway.watch.comparison import best_point
from headway.watch.report.accounting import PARTS, TimeAccount, account
from headway.watch.report.figures import curves, stacked
from headway.watch.runs import attempt_spans
from headway.watch.view import RunView, Snapshot
from headway.watch.view.series import Series
from headway.watch.view.source import clean, clean_indented, last_lines, newest_object, read_text

_MAX_FIGURES = 24
_MAX_MESSAGES = 100
_DIFF_BYTES = 1 << 18
_ZONED = "%Y-%m-%d %H:%M:%S %Z"
"""with the time zone of all times of the page, which may be read elsewhere"""
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #dde1e8; --paper: #fff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa3b2; --line: #333b48; --paper: #13171d;
  --card: #1b212a; } }
* { box-sizing: border-box; } body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 960px; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; } p { margin: .3rem 0; }
.soft, figcaption, summary { color: var(--soft); } .verdict { font-size: 1.1rem; padding: .6rem .9rem;
  margin: .8rem 0; border-left: 5px solid var(--soft); background: var(--card); }
.done { border-color: #4a9d6f; } .failed, .lost { border-color: #b5534f; } .running { border-color: #3b6fb6; }
.stopped, .interrupted, .cancelled { border-color: #e08a3c; } .bad { color: #b5534f; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: .6rem; }
.cards div { background: var(--card); border-radius: 6px; padding: .5rem .8rem; }
.cards b { display: block; font-size: 1.25rem; } .cards span { color: var(--soft); font-size: .85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
figure { margin: 0; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); } .item { white-space: nowrap; margin-right: 1em; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .35em; }
.stack { display: flex; height: 26px; border-radius: 5px; overflow: hidden; margin-bottom: .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; } th { color: var(--soft); font-weight: 500; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:not(:last-child), th { white-space: nowrap; }
pre { background: var(--card); border-radius: 6px; padding: .7rem; overflow-x: auto; font-size: .82rem;
  white-space: pre-wrap; } summary { cursor: pointer; padding: .2rem 0; }
@media (max-width: 640px) { table { display: block; overflow-x: auto; } .item { white-space: normal; } }
"""


def write_report(run: Run, file: Path | None = None, *, price: float | None = None) -> Path:
    """Writes the report of a run, by default to `report.html` in its directory. `price` is the price of a GPU-hour.

    >>> write_report(Run.open("runs/digits-2026.11.15-14.30-x7k2"))
    PosixPath('runs/digits-2026.11.15-14.30-x7k2/report.html')
    """
    page = render(run, price=price)
    target = file or run.report_file
    with files.storage(f"write {target}"):
        files.write_atomic(target, page.encode("utf-8", "replace"))
    return target


def render(run: Run, *, price: float | None = None) -> str:
    """Returns the report as a complete page. It reads every row of the run's metrics, which may take a while."""
    view = RunView(run, thorough=True)
    snapshot = view.refresh()
    info = view.info()
    times = account(view, snapshot)
    body = [
        _title(snapshot, info),
        _cards(snapshot, times, price),
        _failure(run, snapshot),
        _curves(snapshot.curves),
        _times(times),
        _plan(snapshot.plan),
        _attempts(view, snapshot),
        _ranks(snapshot),
        _devices(snapshot),
        _messages(snapshot),
        _settings(run, info),
        _code(run, info),
        _environment(run),
        f"<p class=soft>headway {escape(__version__)}, {_moment(snapshot.time, _ZONED)}, {escape(str(run.path))}</p>",
    ]
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(snapshot.header.id)}</title><style>{_STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


# --- the first screen


def _title(snapshot: Snapshot, info: Mapping[str, Any]) -> str:
    header = snapshot.header
    command = info.get("command")
    line = shlex.join(map(str, command)) if isinstance(command, list) else ""
    step = "without a step" if header.step is None else f"after {plural(header.step, 'step')}"
    best = "".join(
        f"; best {escape(name)} <b>{value:.4g}</b> at step {at:,}"
        for name, value, at in _best(snapshot.curves)[:2]
    )
    why = f"<br>{escape(header.why)}" if header.why else ""
    where = f"{plural(header.nodes, 'node')} x {header.world_size // header.nodes} {header.device}"
    return (
        f"<h1>{escape(header.id)}</h1><p class=soft>{escape(where)}, began {_moment(header.began, _ZONED)}"
        f"<br><code>{escape(clean(line, 500))}</code></p>"
        f"<p class='verdict {escape(header.state)}'><b>{escape(header.state)}</b> {step} in "
        f"{format_duration(header.elapsed_s)}{best}{why}</p>"
    )


def _cards(snapshot: Snapshot, times: TimeAccount, price: float | None) -> str:
    header, speed = snapshot.header, snapshot.speed
    unit = "GPU-hours" if header.device.startswith("cuda") else "rank-hours"
    found = {
        "goodput": "-" if times.goodput is None else f"{times.goodput:.0%}",
        unit: f"{times.rank_hours:,.2f}",
        "attempts": str(header.attempts),
        "samples/s": "-" if speed.samples_per_s is None else f"{speed.samples_per_s:,.0f}",
        "step, median": "-" if speed.step_median_s is None else f"{1000 * speed.step_median_s:,.1f} ms",
        "newest checkpoint": "-" if snapshot.safety.step is None else f"step {snapshot.safety.step:,}",
    }
    if price is not None:
        found["cost"] = f"{times.rank_hours * price:,.2f}"
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in found.items()
    )
    return f"<div class=cards>{cards}</div>"


def _best(named: Mapping[str, Series]) -> list[tuple[str, float, int]]:
    """Returns name, best value and its step of each metric that is not of training and has a best value."""
    validated = {name: series for name, series in named.items() if not name.startswith("train")}
    return [(name, *best) for name, series in validated.items() if (best := best_point(name, series))]


def _failure(run: Run, snapshot: Snapshot) -> str:
    failure = snapshot.failure
    if failure is None:
        return ""
    text = "\n".join(failure.traceback) or failure.error
    log = "\n".join(
        clean_indented(line) for line in last_lines(run.path, run.log_file(failure.rank or 0))[-40:]
    )
    facts = {"rank": failure.rank, "host": failure.host or None, "step": failure.step}
    where = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return (
        f"<h2>The first failure</h2><p>{escape(where)}</p><pre>{escape(text)}</pre>"
        f"<details><summary>the end of its log</summary><pre>{escape(log)}</pre></details>"
    )


# --- figures


def _curves(named: Mapping[str, Series]) -> str:
    """Draws a figure per metric; training and validation of the same metric share one."""
    groups: dict[str, dict[str, Series]] = {}
    for name in sorted(named, key=_group_order):
        groups.setdefault(_group(name), {})[name] = named[name]
    drawn = [curves(group) for group in list(groups.values())[:_MAX_FIGURES]]
    more = f"<p class=soft>and {len(groups) - _MAX_FIGURES} more</p>" if len(groups) > _MAX_FIGURES else ""
    return f"<h2>Curves</h2><div class=figures>{''.join(drawn)}</div>{more}" if any(drawn) else ""


def _group(name: str) -> str:
    first, _, rest = name.partition("/")
    return rest if rest and first in ("train", "val", "validation") else name


def _group_order(name: str) -> tuple[bool, str, bool]:
    group = _group(name)
    return "loss" not in group, group, not name.startswith("train")


def _times(times: TimeAccount) -> str:
    if times.total_s <= 0:
        return ""
    rows = [
        (
            f"<b>{escape(name)}</b>",
            escape(PARTS[name]),
            format_duration(seconds),
            f"{seconds / times.total_s:.1%}",
        )
        for name, seconds in times.parts.items()
        if seconds > 0
    ]
    if times.repeated.count:
        rows.append(("", str(times.repeated), "", ""))
    if times.between_s >= 1:
        rows.append(
            (
                "between",
                "attempts: in the queue, or until it was started again",
                format_duration(times.between_s),
                "",
            )
        )
    return f"<h2>Where the time went</h2>{stacked(times.parts, PARTS)}{_table((), rows)}"


def _plan(plan: Sequence[PlanComparison]) -> str:
    """Compares the plan with the run, by the numbers that both have."""
    names = {"step": "seconds per step", "memory": "memory, allocated"}
    rows = []
    for each in plan:
        if each.measured and each.ratio:
            show = "{:.4g} s".format if each.what == "step" else format_bytes
            values = show(each.planned.value), show(each.measured)
            rows.append((escape(names[each.what]), *values, f"{each.ratio:.0%}"))
    return (
        f"<h2>Plan against actual</h2>{_table(('', 'plan', 'actual', 'actual / plan'), rows)}" if rows else ""
    )


# --- tables


def _attempts(view: RunView, snapshot: Snapshot) -> str:
    attempts = view.attempts
    is_running = snapshot.header.state in ("running", "starting")
    spans = attempt_spans(view.run, attempts, is_running=is_running)
    rows = []
    for at, (each, (begin, end)) in enumerate(zip(attempts, spans, strict=True), 1):
        logged = [part.last_step for part in view.metrics.step_ranges if begin <= part.last_time <= end]
        ended = _moment(end) if each.get("ended") else f"{_moment(end)}, its last row"
        rows.append(
            (
                escape(clean(each.get("number", ""), 20)),
                escape(clean(each.get("status", ""), 40)),
                _moment(begin),
                "" if is_running and at == len(attempts) else ended,
                escape(_steps(each, logged)),
                escape(clean(each.get("host", ""), 60)),
            )
        )
    columns = ("", "status", "started", "ended", "steps", "host")
    return f"<h2>Attempts</h2>{_table(columns, rows)}" if rows else ""


def _steps(attempt: Mapping[str, Any], logged: Sequence[int]) -> str:
    """Returns the steps of an attempt. One that was killed reached at least its last log point."""
    if "step_started" not in attempt:
        return ""
    first = clean(attempt["step_started"], 20)
    if "step_ended" in attempt:
        return f"{first} to {clean(attempt['step_ended'], 20)}"
    return f"{first} to at least {max(logged)}" if logged else f"from {first}"


def _ranks(snapshot: Snapshot) -> str:
    if len(snapshot.ranks) < 2:
        return ""
    rows = [
        (
            str(row.rank) + (" <b>straggler</b>" if row.is_straggler else ""),
            "-" if row.relative is None else f"{row.relative:.2f}x",
            "-" if row.data_share is None else f"{row.data_share:.0%}",
            "-" if row.memory_peak is None else format_bytes(row.memory_peak),
            escape(row.host),
        )
        for row in snapshot.ranks[:16]
    ]
    note = f"the slowest {len(rows)} of {len(snapshot.ranks):,}, at their newest log points"
    return f"<h2>Ranks</h2><p class=soft>{note}</p>{_table(('rank', 'own time', 'data wait', 'memory', 'host'), rows)}"


def _devices(snapshot: Snapshot) -> str:
    rows = []
    for node in snapshot.nodes[:32]:
        gpus = node["gpus"]
        hot = max((gpu.get("temperature", 0) for gpu in gpus), default=0)
        rows.append(
            (
                escape(node["host"]),
                f"{node.get('cpu', 0):.0%}",
                format_bytes(node.get("memory_used", 0)),
                str(len(gpus)),
                f"{hot} °C" if hot else "-",
                escape(", ".join(sorted({why for gpu in gpus for why in gpu["throttling"]})) or "-"),
            )
        )
    heads = ("node", "CPU", "memory", "GPUs", "hottest", "throttled by")
    return f"<h2>Devices, last sample</h2>{_table(heads, rows)}" if rows else ""


def _messages(snapshot: Snapshot) -> str:
    rows = [
        (_moment(each.time), escape(each.kind), str(each.rank), escape(each.text))
        for each in snapshot.messages[-_MAX_MESSAGES:]
    ]
    return f"<h2>Messages</h2>{_table(('', '', 'rank', ''), rows)}" if rows else ""


# --- what ran


def _settings(run: Run, info: Mapping[str, Any]) -> str:
    text = read_text(run.path, run.config_file) or str(info.get("config") or "")
    return f"<h2>Settings</h2><pre>{escape(_lines(text))}</pre>" if text.strip() else ""


def _code(run: Run, info: Mapping[str, Any]) -> str:
    code = info.get("code")
    if not isinstance(code, dict):
        return ""
    state = clean(code.get("commit") or code.get("note") or "unknown", 200)
    branch = f" on {clean(code['branch'], 100)}" if code.get("branch") else ""
    changed = ", with uncommitted changes" if code.get("dirty") else ""
    diff = read_text(run.path, run.diff_file, _DIFF_BYTES)
    shown = (
        f"<details><summary>uncommitted changes</summary><pre>{escape(_lines(diff))}</pre></details>"
        if diff
        else ""
    )
    return f"<h2>Code</h2><p>{escape(state + branch + changed)}</p>{shown}"


def _environment(run: Run) -> str:
    text = newest_object(run.path, run.diagnostics_file)[:100_000]
    if not text:
        return ""
    shown = f"<pre>{escape(_lines(text))}</pre>"
    return f"<h2>Environment</h2><details><summary>machine, versions, variables</summary>{shown}</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are HTML."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"


def _lines(text: str) -> str:
    """Removes control characters, and keeps lines and indentation."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _moment(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime(form)
