"""Named points at which a test can make this process fail. They do nothing unless HEADWAY_FAILPOINT is set.

    failpoint("checkpoint.after_manifest")          # in the code

    HEADWAY_FAILPOINT=checkpoint.after_manifest:rank=1:nth=2:kill9 headway run --nproc 4 train.py

The variable holds one or more faults, separated by commas: `name[:rank=R][:nth=N]:action`. A fault happens once, at the
N-th call of that name in the process (by default the first), on rank R (by default on every rank). The rank is $RANK.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

from headway.errors import UsageError
from headway.system.environment import FAILPOINT

ACTIONS = "kill9, raise, stop, exit=CODE, sleep=SECONDS, errno=NAME (such as ENOSPC)"

_calls: defaultdict[str, count[int]] = defaultdict(partial(count, 1))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One parsed fault: what happens at the `nth` call of `name`, on `rank` (None: on every rank)."""

    name: str
    rank: int | None
    nth: int
    action: str
    value: str


def failpoint(name: str) -> None:
    """Fails here if HEADWAY_FAILPOINT names this point; otherwise does nothing.

    >>> failpoint("checkpoint.after_manifest")
    """
    text = os.environ.get(FAILPOINT)
    if text:
        _reach(name, parse(text))


def armed() -> bool:
    """Returns whether any fault is set, so that a loop need not read the environment in every iteration."""
    return bool(os.environ.get(FAILPOINT))


def reset_calls() -> None:
    """Resets the counters of calls, for a process that runs one test after another."""
    _calls.clear()


@lru_cache(maxsize=8)
def parse(text: str) -> tuple[Fault, ...]:
    """Parses the value of HEADWAY_FAILPOINT; raises `UsageError`, which names the valid actions.

    >>> parse("dist.join:rank=1:kill9")
    (Fault(name='dist.join', rank=1, nth=1, action='kill9', value=''),)
    """
    return tuple(_parse_one(part) for part in text.split(","))


def _parse_one(text: str) -> Fault:
    name, *conditions, last = text.strip().split(":") if ":" in text else ("", text)
    action, _, value = last.partition("=")
    where = {"rank": "", "nth": "1"}
    for condition in conditions:
        key, _, number = condition.partition("=")
        if key not in where or not number.isdecimal() or (key, int(number)) == ("nth", 0):
            raise _malformed(text, f"{condition!r} is not rank=R or nth=N")
        where[key] = number
    if not name or not _is_valid(action, value):
        raise _malformed(text, f"{last!r} is not an action" if name else "it names no failpoint")
    rank = int(where["rank"]) if where["rank"] else None
    return Fault(name=name, rank=rank, nth=int(where["nth"]), action=action, value=value)


def _is_valid(action: str, value: str) -> bool:
    if action in ("kill9", "raise", "stop"):
        return not value
    if action == "exit":
        return value.isdecimal() and int(value) < 256
    if action == "sleep":
        return value.replace(".", "", 1).isdecimal()
    return action == "errno" and value in errno.errorcode.values()


def _malformed(text: str, problem: str) -> UsageError:
    return UsageError(
        f"{FAILPOINT}={text!r} is not valid: {problem}. "
        f"Expected name[:rank=R][:nth=N]:action, with an action of: {ACTIONS}."
    )


def _reach(name: str, faults: tuple[Fault, ...]) -> None:
    call = next(_calls[name])
    rank = int(os.environ.get("RANK", "0"))
    for fault in faults:
        if fault.name == name and fault.nth == call and fault.rank in (None, rank):
            _execute(fault)


def _execute(fault: Fault) -> None:
    match fault.action:
        case "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(int(fault.value))
        case "sleep":
            time.sleep(float(fault.value))
        case "errno":
            number = next(n for n, symbol in errno.errorcode.items() if symbol == fault.value)
            raise OSError(number, os.strerror(number), f"failpoint {fault.name}")
        case _:
            raise RuntimeError(f"failpoint {fault.name} raises, as set by HEADWAY_FAILPOINT")
