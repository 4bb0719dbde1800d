"""SLURM's compressed lists of host names: `cn-l[084-085,090],gpu[1-3]`."""

from __future__ import annotations

import re
from itertools import product

from headway.errors import UsageError

_HOSTS_MAX = 100_000  # SLURM's own limit is lower; a typo such as n[1-9999999999] must not eat the memory
_NAME = re.compile(r"[^\[\],\s]+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(hostlist: str) -> list[str]:
    """Lists the hosts of a SLURM host list, in its order, as `scontrol show hostnames` does.

    >>> expand("cn-l[084-085,090],gpu[1-3]")
    ['cn-l084', 'cn-l085', 'cn-l090', 'gpu1', 'gpu2', 'gpu3']
    """
    hosts: list[str] = []
    for word in _split(hostlist):
        parts = [_choices(part, hostlist) for part in re.split(r"(\[[^\]]*\])", word) if part]
        size = 1
        for part in parts:
            size *= len(part)
        if len(hosts) + size > _HOSTS_MAX:
            raise _bad(hostlist, f"it names more than {_HOSTS_MAX} hosts")
        hosts += ["".join(pieces) for pieces in product(*parts)]
    return hosts


def _split(hostlist: str) -> list[str]:
    """Splits at the commas that stand outside brackets."""
    words = re.split(r",(?![^\[]*\])", hostlist.strip())
    if words == [""]:
        raise _bad(hostlist, "it is empty")
    if "" in words:
        raise _bad(hostlist, "a name is missing between two commas")
    return words


def _choices(part: str, hostlist: str) -> list[str]:
    """The strings that one piece of a word stands for: itself, or each number of a bracket."""
    if not part.startswith("["):
        if not _NAME.fullmatch(part):
            raise _bad(hostlist, f"{part!r} is not part of a host name")
        return [part]
    numbers: list[str] = []
    for piece in part[1:-1].split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _bad(hostlist, f"{piece!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _bad(hostlist, f"the range {piece!r} runs backwards")
        if int(last) - int(first) >= _HOSTS_MAX:
            raise _bad(hostlist, f"it names more than {_HOSTS_MAX} hosts")
        # the width of the first number pads the rest: 084-090 counts 084, 085, ...
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _bad(hostlist: str, why: str) -> UsageError:
    return UsageError(
        f"the host list {hostlist[:200]!r} cannot be read: {why}; expected a form like 'n[01-04],gpu7'"
    )
