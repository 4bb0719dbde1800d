"""The screen of `headway watch`: a snapshot laid out for a terminal of a given size. A pure function of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import final

from rich.text import Text

from headway.system.text import format_bytes, format_duration, plural
from headway.watch.terminal.charts import curve, legend, progress_bar, stacked_bar
from headway.watch.view.series import Series, sparkline
from headway.watch.view.snapshot import DatasetRow, Failure, Header, RankRow, RunMessage, Snapshot

STATE_COLORS = {
    "running": "green",
    "starting": "cyan",
    "queued": "cyan",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
    "cancelled": "yellow",
}
"""colors of the states that have one"""
_MARGIN = 10
_TALL = 34
"""on a screen with at least this many lines, a large curve comes before further ranks and messages"""
_CURVE_LINES = 14
_RISK_S = 3600.0
_DATA_SHARE = 0.1
"""a rank that waits for data for a larger share of its time is marked"""
_HOT_C = 85


@final
@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the keys have chosen."""

    curve: int = 0
    rank: int | None = None
    """the rank whose log is shown; None for messages of all ranks"""
    run: tuple[int, int] = (1, 1)
    """number of the run, and how many there are"""
    log: Sequence[str] = ()
    """the last lines of the chosen rank's log"""
    has_keys: bool = True


def layout(snapshot: Snapshot, width: int, height: int, chosen: Selection | None = None) -> list[Text]:
    """Returns the lines of the screen, at most `height` of them and none wider than `width`.

    >>> print(*(line.plain for line in layout(view.refresh(), 80, 24)), sep="\\n")
    """
    chosen = chosen or Selection()
    head = _header(snapshot.header, width, snapshot.time) + _failure(snapshot.failure, height)
    foot = [_keys(chosen)] if chosen.has_keys else []
    fixed = [
        *_speed(snapshot, width),
        *_data(snapshot.data, snapshot.header.world_size),
        *_safety(snapshot),
        *_nodes(snapshot),
    ]
    room = height - len(head) - len(fixed) - len(foot)
    names = ordered_curves(snapshot.curves)
    selected = names[chosen.curve % len(names)] if names else ""
    learning = _learning(snapshot.curves, names, width, min(max(1, room // 3), 12), selected)
    room -= len(learning)
    share = 3 if height >= _TALL else 2  # a tall screen keeps a third for a large curve
    ranks = _ranks(snapshot.ranks, max(2, room // share), chosen.rank)
    room -= len(ranks)
    messages = _messages(snapshot, chosen, max(0, room // 2 if share == 3 else room))
    room -= len(messages)
    chart = _chart(snapshot.curves.get(selected), selected, width, min(_CURVE_LINES, room - 3))
    if (left := room - len(chart)) > 0:  # further ranks rather than empty lines
        ranks = _ranks(snapshot.ranks, len(ranks) + left, chosen.rank)
    body = [*learning, *chart, *fixed, *ranks, *messages]
    lines = [*head, *body][: max(0, height - len(foot))]
    lines += [Text()] * (height - len(foot) - len(lines)) if foot else []
    lines += foot
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


# --- who and where


def _header(header: Header, width: int, now: float) -> list[Text]:
    style = f"bold {STATE_COLORS.get(header.state, '')}"
    state = Text().append(header.state.upper(), style)
    if header.silent_s is not None:
        state.append(f", silent for {format_duration(header.silent_s)}", "bold yellow")
    first = Text().append(header.id, "bold")
    first.append(" " * max(2, width - len(header.id) - len(state)))
    first.append_text(state)
    facts = [
        f"epoch {header.epoch}{f' of {header.max_epochs}' if header.max_epochs else ''}"
        if header.epoch
        else "",
        f"attempt {header.attempts}" if header.attempts else "",
        f"job {header.job}" if header.job else "",
        f"{plural(header.nodes, 'node')} x {header.world_size // max(1, header.nodes)} {header.device}".rstrip(),
        f"began {_clock(header.began, now)}",
    ]
    lines = [first, _progress(header, width), Text(" · ".join(filter(None, facts)), "dim")]
    if header.why:
        lines.append(Text(header.why, style))
    return lines


def _progress(header: Header, width: int) -> Text:
    if header.step is None:
        return Text("no step yet" if header.state in ("starting", "running") else "", "dim")
    text = f"step {header.step:,}" + (f" of {header.total_steps:,}" if header.total_steps else "")
    after = f"elapsed {format_duration(header.elapsed_s)}"
    after += f" in {header.attempts} attempts" if header.attempts > 1 else ""
    if header.eta_s is not None:
        after = f"ETA {format_duration(header.eta_s)} · {after}"
    progress = header.progress
    if progress is None:
        return Text(f"{text} · {after}")
    percent = f" {progress:4.0%}  "
    bar = max(6, min(60, width - len(text) - len(after) - len(percent) - 1))
    return Text.assemble(text, " ", progress_bar(progress, bar), percent, after)


def _failure(failure: Failure | None, height: int) -> list[Text]:
    if failure is None:
        return []
    room = max(3, height // 4)
    return [
        _labelled("failure" if not number else "", line, "red")
        for number, line in enumerate(failure.traceback[-room:])
    ]


# --- learning


def ordered_curves(curves: Mapping[str, Series]) -> list[str]:
    """Returns the names of curves in the order in which they are shown: losses, other metrics, learning rates."""

    def key(name: str) -> tuple[int, int, str]:
        last = name.rpartition("/")[2].lower()
        kind = 0 if "loss" in last else 2 if last.startswith(("lr", "grad")) or "/lr" in name else 1
        return kind, not name.startswith("train"), name

    return sorted((name for name in curves if not name.startswith("data/")), key=key)


def _learning(
    curves: Mapping[str, Series], names: Sequence[str], width: int, most: int, selected: str
) -> list[Text]:
    if not names:
        return [_labelled("learning", "no metric yet", "dim")]
    shown = list(names[:most])
    names_width = min(28, max(len(name) for name in shown))
    lines = []
    for number, name in enumerate(shown):
        series = curves[name]
        text = Text().append(f"{name[:names_width]:<{names_width}} ", "bold" if name == selected else "")
        text.append(f"{_number(series.last):>10} ", "bold" if name == selected else "")
        text.append(sparkline(series, max(8, min(60, width - _MARGIN - names_width - 36))), "cyan")
        if series.means:
            text.append(f"  {_number(min(series.lows))} … {_number(max(series.highs))}", "dim")
        if series.non_finite:
            text.append(f"  {series.non_finite} not finite", "red")
        more = f"+{len(names) - most} more" if number == 1 and len(names) > most else ""
        lines.append(_labelled("learning" if not number else more, text))
    return lines


def _chart(series: Series | None, name: str, width: int, height: int) -> list[Text]:
    if series is None or height < 4:
        return []
    drawn = curve(series, width - _MARGIN, height)
    if not drawn:
        return []
    begin, end = f"{series.steps[0]:,}", f"step {series.steps[-1]:,}"
    axis = f"{'':9}{begin}{end:>{max(1, width - _MARGIN - 9 - len(begin))}}"
    return [
        Text(),
        _labelled("curve", name, "bold"),
        *(_labelled("", line, "cyan") for line in drawn),
        _labelled("", axis, "dim"),
    ]


# --- speed, data, safety


def _speed(snapshot: Snapshot, width: int) -> list[Text]:
    speed, world = snapshot.speed, snapshot.header.world_size
    if speed.step_median_s is None:
        return []
    text = Text()
    if speed.samples_per_s:
        text.append(f"{speed.samples_per_s:,.0f} samples/s", "bold")
        text.append(f" ({speed.samples_per_s / world:,.0f} per rank)  " if world > 1 else "  ")
    text.append(f"step {_seconds(speed.step_median_s)}, p95 {_seconds(speed.step_p95_s)}")
    if speed.mfu is not None:
        text.append(f"  MFU {speed.mfu:.0%}")
    for ratio in (1 / each.ratio for each in snapshot.plan if each.what == "step" and each.ratio):
        text.append(f"  {ratio:.0%} of planned speed", "yellow" if ratio < 0.9 else "")
    found = [_labelled("speed", text)]
    if speed.shares:
        found.append(_labelled("", stacked_bar(speed.shares, max(10, min(100, width - _MARGIN)))))
        found.append(_labelled("", legend(speed.shares)))
    return found


def _data(rows: Sequence[DatasetRow], world_size: int) -> list[Text]:
    found: list[Text] = []
    whose = " of rank 0" if world_size > 1 else ""
    for row in rows:
        parts = [f"cache hits {row.cache_hits:.0%}"] if row.cache_hits is not None else []
        parts += [f"{row.bad:,} bad"] if row.bad is not None else []
        parts += [f"{name} {share:.1%} (target {target:.1%})" for name, share, target in row.mixture[:6]]
        if parts:
            found.append(_labelled("" if found else "data", f"{row.name}{whose}: {', '.join(parts)}"))
    return found[:3]


def _safety(snapshot: Snapshot) -> list[Text]:
    safety, state = snapshot.safety, snapshot.header.state
    text = Text()
    if safety.step is None or safety.age_s is None:
        text.append("no checkpoint yet", "yellow" if state == "running" else "dim")
    else:
        text.append(f"saved step {safety.step:,}, {format_duration(safety.age_s)} ago")
        if safety.size_bytes is not None and safety.save_s is not None:
            text.append(f" ({format_bytes(safety.size_bytes)} in {safety.save_s:.1f} s)", "dim")
        if state == "running":
            text.append(
                f" · at risk {format_duration(safety.age_s)}", "yellow" if safety.age_s > _RISK_S else ""
            )
    if safety.limit_left_s is not None:
        text.append(f" · time limit in {format_duration(max(0.0, safety.limit_left_s))}")
    return [_labelled("safety", text)]


def _nodes(snapshot: Snapshot) -> list[Text]:
    """Summarizes the devices of all nodes in one line."""
    nodes = snapshot.nodes
    if not nodes:
        return []
    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    parts = []
    if gpus:
        used = [gpu["utilization"] for gpu in gpus if "utilization" in gpu]
        parts.append(
            f"{plural(len(gpus), 'GPU')}: {sum(used) / len(used):.0%} busy"
            if used
            else plural(len(gpus), "GPU")
        )
        heat = [gpu["temperature"] for gpu in gpus if "temperature" in gpu]
        parts += [f"up to {max(heat)} °C"] if heat else []
        power = sum(gpu.get("power", 0.0) for gpu in gpus)
        parts += [f"{power:,.0f} W"] if power else []
        slowed = [gpu for gpu in gpus if gpu.get("throttling")]
        parts += [f"{len(slowed)} throttled ({slowed[0]['throttling'][0]})"] if slowed else []
        broken = sum(bool(gpu.get("ecc_errors")) for gpu in gpus)
        parts += [f"{broken} with ECC errors"] if broken else []
    cpus = [node["cpu"] for node in nodes if "cpu" in node]
    parts += [f"CPU {max(cpus):.0%}"] if cpus else []
    memory = [node.get("memory_used", 0) / node["memory_total"] for node in nodes if node.get("memory_total")]
    parts += [f"memory {max(memory):.0%}"] if memory else []
    for what, name in (("disk", "disk_read"), ("network", "network_received")):
        rates = [node[name] for node in nodes if name in node]
        parts += [f"{what} {format_bytes(sum(rates))}/s"] if rates else []
    return [_labelled("devices", ", ".join(parts))]


# --- ranks and messages


def _ranks(rows: Sequence[RankRow], most: int, chosen: int | None) -> list[Text]:
    if len(rows) < 2 and chosen is None:
        return []
    head = _labelled(
        "ranks",
        f"{'rank':>6} {'own time':>9} {'data wait':>10} {'memory':>9} {'GPU':>5} {'°C':>4}  host",
        "dim",
    )
    shown = list(rows[: max(1, most - 1)])
    if chosen is not None and chosen not in [row.rank for row in shown]:
        shown[-1:] = [row for row in rows if row.rank == chosen] or shown[-1:]
    lines = [head, *(_rank(row, row.rank == chosen) for row in shown)]
    if len(rows) > len(shown):
        lines[0].append(f" (slowest of {len(rows):,})", "dim")
    return lines


def _rank(row: RankRow, is_chosen: bool) -> Text:
    gpu = row.gpu
    memory = gpu.get("memory_used", row.memory_peak)
    text = Text(f"{'>' if is_chosen else ' '}{row.rank:>5} ")
    text.append(
        f"{'-' if row.relative is None else f'{row.relative:.2f}x':>9} ",
        "bold red" if row.is_straggler else "",
    )
    share = row.data_share
    text.append(
        f"{'-' if share is None else f'{share:.0%}':>10} ", "yellow" if (share or 0) > _DATA_SHARE else ""
    )
    text.append(f"{'-' if memory is None else format_bytes(memory):>9} ")
    used = gpu.get("utilization")
    text.append(f"{'-' if used is None else f'{used:.0%}':>5} ")
    heat = gpu.get("temperature")
    text.append(f"{'-' if heat is None else heat:>4} ", "red" if (heat or 0) >= _HOT_C else "")
    text.append(f" {row.host}")
    if row.is_straggler:
        text.append("  straggler", "bold red")
    if gpu.get("throttling"):
        text.append(f"  throttled: {gpu['throttling'][0]}", "yellow")
    return _labelled("", text)


def _messages(snapshot: Snapshot, chosen: Selection, most: int) -> list[Text]:
    if most < 1:
        return []
    if chosen.rank is not None:
        lines = [Text(line) for line in chosen.log[-most:]] or [Text("its log is empty", "dim")]
        return [_labelled("" if number else f"log {chosen.rank}", line) for number, line in enumerate(lines)]
    found: list[Text] = []
    for message, count in _repeated(snapshot.messages)[-most:]:
        style = (
            "red"
            if message.kind in ("failed", "interrupted")
            else "yellow"
            if message.kind != "weights"
            else ""
        )
        where = f" rank {message.rank}" if message.rank else ""
        text = Text.assemble(
            (f"{_clock(message.time, snapshot.time)}{where} ", "dim"),
            (message.kind, style),
            (f" x{count}" if count > 1 else "", style),
            " ",
            message.text,
        )
        found.append(_labelled("" if found else "messages", text))
    return found or [_labelled("messages", "none", "dim")]


def _repeated(messages: Sequence[RunMessage]) -> list[tuple[RunMessage, int]]:
    """Counts consecutive messages that differ in numbers only; the newest stands for all of them."""
    found: list[tuple[RunMessage, int]] = []
    for message in messages:
        before, count = found[-1] if found else (None, 0)
        is_same = before and (before.kind, before.rank, _words(before)) == (
            message.kind,
            message.rank,
            _words(message),
        )
        found[-1:] = [(message, count + 1)] if is_same else [*found[-1:], (message, 1)]
    return found


def _words(message: RunMessage) -> str:
    return re.sub(r"[\d.]+", "0", message.text)


def _keys(chosen: Selection) -> Text:
    number, count = chosen.run
    runs = f"n/p run {number} of {count}   " if count > 1 else ""
    return Text(f"q quit   {runs}c curve   ↑/↓ rank and its log   m messages", "dim")


# --- text


def _labelled(label: str, content: str | Text, style: str = "") -> Text:
    line = Text().append(f"{label:<{_MARGIN}}", "dim")  # `Text(..., style)` would style the whole line
    return line.append_text(content) if isinstance(content, Text) else line.append(content, style)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _clock(moment: float, now: float) -> str:
    """Formats a time, with the date if it is not today."""
    at = datetime.fromtimestamp(moment)
    same = at.date() == datetime.fromtimestamp(now).date()
    return at.strftime("%H:%M:%S" if same else "%m-%d %H:%M")
