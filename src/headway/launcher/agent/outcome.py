"""How a launch ended: the first cause, as the ranks agreed on it or as their agent saw it, and the final report."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.dist.failure.record import (
    FailureKind,
    FailureRecord,
    describe_exit_status,
    format_cause,
    is_native_crash,
)
from headway.errors import HeadwayError
from headway.launcher.agent.stderr import RankStderr, error_line, is_echo_of_another
from headway.run import Run
from headway.run.exit_codes import EXIT_CODES
from headway.run.status import describe_failure
from headway.system import files
from headway.system.jsonlines import parse_json
from headway.system.log import logger
from headway.system.redact import redact

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
"""signals that others send: the output of the process does not explain them"""
_LEFT = "ended early (it returned, or called sys.exit) while the others still worked"
_TAIL_LINES, _TAIL_BYTES = 8, 8192


def is_crash(outcome: Mapping[str, Any]) -> bool:
    """Whether a restart may help: a rank failed, with none of the exit codes for errors that would recur."""
    return bool(outcome["exit_code"] == 1)


def summary(outcome: Mapping[str, Any], world_size: int) -> str:
    """Returns the report that is printed last."""
    code, record = int(outcome["exit_code"]), outcome.get("record")
    sentence = (record or {}).get("sentence")
    if code in EXIT_CODES:
        return f"headway: {sentence or EXIT_CODES[code].sentence}\n"
    if record and record["kind"] in ("staging", "doctor"):  # there were no ranks yet
        return f"headway: {sentence}\n"
    if not record:
        return f"headway: exit code {code}\n"
    where = record.get("failure_file")  # it may be missing on a full disk
    return format_cause(record, world_size, where if where and Path(where).exists() else None)


def reason(outcome: Mapping[str, Any]) -> str:
    """Returns why a launch ended, in a few words for the list of runs; empty if the ranks have recorded as much."""
    code, record = int(outcome["exit_code"]), outcome.get("record") or {}
    if record.get("sentence"):
        return str(record["sentence"])
    if not record.get("error") or (code in EXIT_CODES and record["kind"] == "exit"):
        return ""
    return describe_failure(record)


def first_failure(
    path: Path,
    ended: Mapping[int, int],
    pids: Mapping[int, int],
    outputs: Mapping[int, RankStderr] = MappingProxyType({}),
) -> FailureRecord:
    """Returns the first cause that the ranks recorded, with the exit status that only their parent process has.

    Ranks that do not use headway record nothing: `outputs` shows which of them failed first.
    """
    if files.is_listed(path):
        record: FailureRecord = parse_json(files.read_regular(path))
        rank = record.get("rank")
        explained = record["kind"] != "vanished" or bool(record.get("sentence"))
        if not explained and rank is not None and rank in ended:
            status = ended[rank]
            early = " while the others still worked" if status >= 0 else ""
            record |= {"error": describe_exit_status(status) + early, "hint": None}
            # the output of rank 0 is on the screen
            if is_native_crash(status) and rank and (where := record.get("failure_file")):
                record["output"] = _end_of_log(Path(where).parent, rank)
            if status in EXIT_CODES:
                record["exit_code"] = status
            _complete(record)
        return record
    return _first_by_output(ended, pids, outputs)


def _first_by_output(
    ended: Mapping[int, int], pids: Mapping[int, int], outputs: Mapping[int, RankStderr]
) -> FailureRecord:
    """Returns the first cause among ranks that have recorded none: a traceback, an exit status, or an early end.

    What others write because of it (echoes) comes later or sooner: a rank that fails may take long to exit.
    """
    failed = {rank: status for rank, status in ended.items() if status}
    tracebacks = {
        rank: text
        for rank, status in failed.items()
        if status not in EXIT_CODES and -status not in (signal.SIGINT, *_FROM_OUTSIDE) and rank in outputs
        if (text := outputs[rank].traceback()) is not None
    }
    echoes = [rank for rank, text in tracebacks.items() if is_echo_of_another(text)]
    if raised := [rank for rank in tracebacks if rank not in echoes]:
        rank = min(raised, key=lambda each: outputs[each].traced)
        text, at = tracebacks[rank], outputs[rank].traced
        return _record("exception", rank, pids, error=error_line(text), traceback=text, at=at)
    left = [rank for rank, status in ended.items() if not status or _has_left(status, outputs.get(rank))]
    if echoes and left and not [rank for rank in failed if rank not in (*echoes, *left)]:
        return _record("left", left[0], pids, error=_LEFT)
    rank = next((rank for rank in failed if rank not in echoes), next(iter(failed)))
    if rank in echoes:
        text, at = tracebacks[rank], outputs[rank].traced
        return _record("exception", rank, pids, error=error_line(text), traceback=text, echo=True, at=at)
    status = failed[rank]
    hint = None if -status in _FROM_OUTSIDE else "its own output, above, says why"
    record = _record("exit", rank, pids, error=describe_exit_status(status), hint=hint)
    record["exit_code"] = status if status in EXIT_CODES else 1
    if rank in outputs and (said := _own_sentence(outputs[rank])):
        return record | {"sentence": said, "exit_code": status if status > 0 else 1}
    if rank in outputs and status not in EXIT_CODES and (lines := outputs[rank].text().splitlines()):
        record["output"], record["hint"] = redact("\n".join(lines[-_TAIL_LINES:])), None
    return record


def _own_sentence(output: RankStderr) -> str | None:
    """Returns the last line of a rank if headway has written it there, because the rank could not join the others."""
    last = (output.text().splitlines() or [""])[-1]
    return redact(last.removeprefix("headway: ")) if last.startswith("headway: ") else None


def _has_left(status: int, output: RankStderr | None) -> bool:
    """Whether the script of a rank had ended when its interpreter aborted, in the destructors of torch."""
    return -status == signal.SIGABRT and output is not None and output.was_torn_down()


def _record(
    kind: FailureKind,
    rank: int,
    pids: Mapping[int, int],
    *,
    error: str,
    traceback: str | None = None,
    hint: str | None = None,
    echo: bool = False,
    at: float = 0.0,
) -> FailureRecord:
    return {
        "kind": kind,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pids[rank],
        "error": redact(error),
        "traceback": traceback and redact(traceback),
        "hint": hint,
        "exit_code": 1,
        "echo": echo,
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
    }


def record_failure(record: FailureRecord, path: Path) -> None:
    """Records a failure that the agent itself has found, unless the ranks have recorded one."""
    first = True
    try:
        with files.storage(f"write {path}"):
            first = files.publish(path, json.dumps(record).encode())
    except HeadwayError as error:
        logger.error("the failure could not be recorded: %s", error)
    if first:
        _complete(record)


def _end_of_log(run: Path, rank: int) -> str | None:
    """Returns the last lines of a rank's log, where native code explains a crash; None if they cannot be read."""
    try:
        with files.open_regular(Run.open(run).log_file(rank)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="backslashreplace").splitlines()
    except (OSError, HeadwayError):
        return None
    return "\n".join(lines[-_TAIL_LINES:])


def _complete(record: FailureRecord) -> None:
    """Replaces the record in the run directory, whose writer only saw that another rank was gone."""
    where = record.get("failure_file")
    if not where:
        return
    try:
        run = Run.open(Path(where).parent).held_as(record.get("owner"))
        run.write_failure(record, overwrite=True)
    except HeadwayError as error:  # the disk may be what failed
        logger.error("the failure could not be recorded: %s", error)
