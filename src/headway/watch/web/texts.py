"""Text of runs for the tabs of the page: settings, code, diagnostics and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from headway.launcher import sweep
from headway.run import Run
from headway.watch.comparison import SETTINGS_CUT, settings_of
from headway.watch.view.source import (
    clean,
    clean_indented,
    lines_before,
    newest_object,
    read_object,
    read_text,
)
from headway.watch.web.run_library import key_of
from headway.watch.web.run_list import plain_settings

_PAGE_BYTES = 1 << 16
_SEARCH_BYTES = 32 << 20
_SEARCH_CHUNK_BYTES = 1 << 20
_MAX_MATCHES = 500
_MAX_LOGS = 4096
_DIFF_BYTES = 1 << 18
_LOG_NAME = re.compile(r"rank-(\d{5})\.txt")


def settings_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the settings of runs side by side, and the code of each."""
    every = [settings_of(run, sweep.member(run)) for run in runs]
    found = [plain_settings(each, most=len(each)) for each in every]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = [
        {
            "name": name,
            "values": [each.get(name) for each in found],
            "has": [name in each for each in found],
            # settings that were left out may differ
            "differs": len({json.dumps(each.get(name)) for each in found}) > 1
            or (name == SETTINGS_CUT and len(runs) > 1),
        }
        for name in names
    ]
    return {"runs": [key_of(run) for run in runs], "rows": rows, "code": [_code(run) for run in runs]}


def _code(run: Run) -> dict[str, Any]:
    info = read_object(run.path, run.info_file)
    code = info.get("code")
    code = code if isinstance(code, dict) else {}
    command = info.get("command")
    diff = read_text(run.path, run.diff_file, _DIFF_BYTES) or ""
    return {
        "command": clean(" ".join(map(str, command)), 2000) if isinstance(command, list) else "",
        "commit": clean(code.get("commit") or code.get("note") or "unknown", 200),
        "branch": clean(code.get("branch") or "", 100),
        "dirty": bool(code.get("dirty")),
        "diff": [clean_indented(line) for line in diff.splitlines()],
    }


def diagnostics(run: Run) -> list[str]:
    """Returns the diagnostics of the newest attempt (machine and software), as lines."""
    text = newest_object(run.path, run.diagnostics_file)
    return [clean_indented(line) for line in text.splitlines()[:20_000]]


def log_names(run: Run) -> list[str]:
    """Returns the names of a run's logs: "job", and the numbers of ranks."""
    try:
        names = sorted(path.name for path in run.log_dir.iterdir())
    except OSError:
        return []
    ranks = [str(int(match[1])) for name in names if (match := _LOG_NAME.fullmatch(name))]
    return [*(["job"] if run.job_log.name in names else []), *ranks[:_MAX_LOGS]]


def log_page(run: Run, name: str, end: int | None = None, search: str = "") -> dict[str, Any] | None:
    """Returns lines of a log before the offset `end`, with `search` only those that contain it; None without that log.

    `begin` is the offset of the first line that was read; 0 if there are no earlier ones. `left_out` is how many
    further lines from there on contain `search`: of many, only the newest 500 are returned.
    """
    if name not in log_names(run):
        return None
    path = run.job_log if name == "job" else run.log_file(int(name))
    if not search:
        lines, begin = lines_before(run.path, path, end, _PAGE_BYTES)
        return {"lines": [clean_indented(line) for line in lines], "begin": begin, "left_out": 0}
    wanted, read, found, at = search.casefold(), 0, list[str](), end
    while read < _SEARCH_BYTES and len(found) < _MAX_MATCHES:
        lines, begin = lines_before(run.path, path, at, _SEARCH_CHUNK_BYTES)
        found = [clean_indented(line) for line in lines if wanted in line.casefold()] + found
        read += _SEARCH_CHUNK_BYTES
        if begin == 0 or begin == at:
            at = 0
            break
        at = begin
    shown = found[-_MAX_MATCHES:]
    return {"lines": shown, "begin": at or 0, "left_out": len(found) - len(shown)}
