"""Watching over a run that moves: rank 0 asks around when it has stood still for long, and finds out who is to blame.

As long as rank 0 moves nobody is asked anything. Once it has stood still for half of what its phase allows, the hub
asks all ranks where they are; a thread of each answers, whatever its main thread waits for. When nobody has moved for
longer than his own limit, or does not even answer, that is a hang. Ages are told in seconds: no clocks are compared.

    hub -> rank    ask (with or without stacks), noted
    rank -> hub    here, still
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch.distributed as c10d

from headway.dist.control.channel import Message
from headway.dist.failure import hang, heartbeat
from headway.dist.failure.hang import RankStatus
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.roster import RankInfo

_OFTEN = 8  # looks, and questions, in one period
_SLOWEST = 60.0  # seconds between two looks
_ANSWER = 2.0  # seconds that ranks have to send their stacks


def answer(heart: Heartbeat, question: Mapping[str, Any]) -> Message:
    """What a rank says when it is asked where it is."""
    return {
        "type": "here",
        "phase": heart.phase,
        "step": heart.step,
        "age": heart.age,
        "limit": None if heart.limit == math.inf else heart.limit,
        "collectives": _collectives(),
        "stack": _stacks() if question["stacks"] else "",
    }


def pause(heart: Heartbeat) -> float:
    """How long a thread that looks after its own rank may sleep."""
    return min(max(heart.period / _OFTEN, 0.05), _SLOWEST)


def _collectives() -> int | None:
    """How many collectives this rank has begun; all threads may ask while the main one waits in the last of them."""
    group = c10d.group.WORLD if c10d.is_initialized() else None
    return int(group._get_sequence_number_for_group()) if group else None  # type: ignore[attr-defined]


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """A rank's last answer, and when it came."""

    words: Message
    when: float

    @property
    def age(self) -> float:
        return float(self.words["age"]) + time.monotonic() - self.when

    @property
    def still(self) -> bool:
        limit = self.words["limit"]
        return limit is not None and self.age >= limit


@final
@dataclass(kw_only=True)
class Watch:
    """What the hub knows of the ranks' movements; `heart` is that of rank 0, in whose process the hub lives."""

    heart: Heartbeat
    ask: Callable[[bool], object]
    """asks all ranks where they are, and for their stacks or not"""
    _heard: dict[int, _Heard] = field(default_factory=dict)
    _since: float | None = None
    _stacks_since: float | None = None
    _asked: float = 0.0

    def patience(self) -> float | None:
        """Seconds until `look` has something to do."""
        if not self.heart.period:
            return None
        return min(0.1, pause(self.heart)) if self._stacks_since is not None else pause(self.heart)

    def hear(self, rank: int, words: Message) -> None:
        self._heard[rank] = _Heard(words=words, when=time.monotonic())

    def look(self, members: Sequence[RankInfo], world_size: int) -> FailureRecord | None:
        """Asks if there is reason to; returns the record of a hang if there is one. `members` are those still here."""
        limit = self.heart.limit
        if not self.heart.period or self.heart.age < limit / 2 or limit == math.inf:
            self._heard, self._since, self._stacks_since = {}, None, None
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._stacks_since is None and now - self._asked >= pause(self.heart):
            stacks = self.heart.age >= limit
            self._asked, self._stacks_since = now, now if stacks else None
            self.ask(stacks)
        return self._judge(members, world_size) if self._stacks_since is not None else None

    def _judge(self, members: Sequence[RankInfo], world_size: int) -> FailureRecord | None:
        assert self._stacks_since is not None and self._since is not None
        now = time.monotonic()
        fresh = {rank for rank, heard in self._heard.items() if heard.when >= self._stacks_since}
        silent = [member.rank for member in members if member.rank not in fresh]
        if silent and now - self._stacks_since < min(_ANSWER, self.heart.limit / 4):
            return None
        self._stacks_since = None
        if any(not self._heard[rank].still for rank in fresh) or now - self._since < self.heart.limit / 2:
            return None  # somebody works, or nobody had the time to answer: ask again
        return hang.record([self._sighting(member, members[0], silent) for member in members], world_size)

    def _sighting(self, member: RankInfo, root: RankInfo, silent: Collection[int]) -> RankStatus:
        if member.rank in silent:
            return _from_outside(member, near=member.host == root.host, age=self.heart.age)
        heard = self._heard[member.rank]
        return RankStatus(
            rank=member.rank,
            host=member.host,
            pid=member.pid,
            phase=heard.words["phase"],
            step=heard.words["step"],
            age=heard.age,
            collectives=heard.words["collectives"],
            stack=heard.words["stack"],
        )


def myself(heart: Heartbeat, rank: int) -> RankStatus:
    """This rank, seen by itself, for when there is nobody to tell."""
    words = answer(heart, {"stacks": True})
    known = {name: words[name] for name in ("phase", "step", "age", "collectives", "stack")}
    return RankStatus(rank=rank, host=socket.gethostname(), pid=os.getpid(), **known)


def silent(heart: Heartbeat, root: RankInfo) -> RankStatus:
    """Rank 0, seen by a rank that hears nothing from it."""
    return _from_outside(root, near=root.host == socket.gethostname(), age=heart.age)


def _from_outside(member: RankInfo, *, near: bool, age: float) -> RankStatus:
    """A rank that does not answer: what the kernel says of it, and its pulse, if it is on this machine."""
    condition = hang.condition(member.pid) if near else "silent"
    folder = os.environ.get("HEADWAY_HEARTBEAT")
    beat = heartbeat.read(Path(folder), member.rank) if near and folder else None
    return RankStatus(
        rank=member.rank,
        host=member.host,
        pid=member.pid,
        phase=beat.phase if beat else None,
        step=beat.step if beat else None,
        age=beat.age if beat else age,
        condition="silent" if condition == "answers" else condition,
    )
