"""The agents of one launch, one or more per node: they find each other, and agree on how it ended.

They meet in a folder that all of them can write. One writer per file, and what must be decided is published once:

    agent-00001.json         host, number of ranks; rewritten by a launch of the same name
    roster.json              agent 0 has seen them all
    round-0/                 the ranks meet here (rendezvous.json); another round for each local restart
        outcome.json         the first failure, or stop; who writes it first decides
        ended-00001.json     the ranks of this agent are down
        spoken.json          the last words are said: agents may leave
        again.json           agent 0: whether there is another round
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headway.errors import RankFailure
from headway.launcher.agent.environment import Seating
from headway.system import files

COMING = 3600.0
"""seconds that agents wait for each other to come: one of them may have to copy data to its node first"""
_PAUSE = 0.1
Outcome = dict[str, Any]
"""exit_code, and the record of the failure if there is one"""


@final
class Team:
    """This agent's view of all agents.

    >>> team = Team(Path("/tmp/x"), number=0, size=1)
    """

    def __init__(self, folder: Path, *, number: int, size: int) -> None:
        self.folder = folder
        self.number = number
        self.size = size
        self._round = 0

    @property
    def round_folder(self) -> Path:
        return self.folder / f"round-{self._round}"

    def gather(self, processes: int, *, host: str | None = None, patience: float = COMING) -> Seating:
        """Meets the other agents and returns where the ranks of this one sit."""
        token = secrets.token_hex(8)
        me = {
            "token": token,
            "host": host or socket.gethostname(),
            "processes": processes,
            "port": free_port(),
        }
        if self.size == 1:
            return seating([me], 0)
        deadline = time.monotonic() + patience
        self._write(self._agent_file(self.number), me)
        if self.number == 0:
            members = [self._await(self._agent_file(number), deadline) for number in range(self.size)]
            self._write(self.folder / "roster.json", {"members": members})
            return seating(members, 0)
        while True:
            members = self._await(self.folder / "roster.json", deadline)["members"]
            if len(members) == self.size and members[self.number]["token"] == token:
                return seating(members, self.number)
            time.sleep(_PAUSE)  # it is that of an earlier launch of this name
            if time.monotonic() > deadline:
                raise self._absent("roster.json")

    def begin_round(self, number: int) -> None:
        self._round = number
        _make(self.round_folder)

    def conclude(self, outcome: Outcome) -> bool:
        """Says how this round ended, unless another agent has said so before; returns whether this one was first."""
        return files.publish(self.round_folder / "outcome.json", json.dumps(outcome).encode())

    def outcome(self) -> Outcome | None:
        """What the first agent to fail or stop has said in this round."""
        return self._read(self.round_folder / "outcome.json")

    def await_outcome(self, patience: float) -> None:
        """Waits until somebody has said how this round ended, but not for long."""
        self._await_file("outcome.json", patience)

    def ended(self, code: int) -> None:
        """Tells the others that the ranks of this agent are down."""
        self._write(self._ended_file(self.number), {"exit_code": code})

    def await_ends(self, patience: float, *, unless: Callable[[], bool]) -> None:
        """Waits until the ranks of all agents are down; in vain where a node is lost, so not for long."""
        deadline = time.monotonic() + patience
        missing = set(range(self.size)) - {self.number}
        while missing and time.monotonic() < deadline and not unless():
            missing = {number for number in missing if self._read(self._ended_file(number)) is None}
            if missing:
                time.sleep(_PAUSE)

    def spoke(self) -> None:
        """Tells the others that the last words of this round are said."""
        self._write(self.round_folder / "spoken.json", {})

    def await_words(self, patience: float) -> None:
        """Waits until the agent that was first to fail has said why, but not for long: it may be lost."""
        self._await_file("spoken.json", patience)

    def agree_on_restart(self, mine: Callable[[], bool], patience: float = 60.0) -> bool:
        """Agent 0 decides whether all start again. Who hears nothing ends."""
        if self.size == 1:
            return mine()
        file = self.round_folder / "again.json"
        if self.number == 0:
            again = mine()
            self._write(file, {"again": again})
            return again
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if (word := self._read(file)) is not None:
                return bool(word["again"])
            time.sleep(_PAUSE)
        return False

    def leave(self) -> None:
        """Takes the folder away, if this is the last agent to leave it."""
        self._write(self.folder / f"left-{self.number:05d}.json", {})
        if len(list(self.folder.glob("left-*.json"))) == self.size:
            shutil.rmtree(self.folder, ignore_errors=True)  # two may both be the last

    def _await(self, path: Path, deadline: float) -> dict[str, Any]:
        while (found := self._read(path)) is None:
            if time.monotonic() > deadline:
                raise self._absent(path.name)
            time.sleep(_PAUSE)
        return found

    def _await_file(self, name: str, patience: float) -> None:
        deadline = time.monotonic() + patience
        while self._read(self.round_folder / name) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    def _absent(self, name: str) -> RankFailure:
        return RankFailure(
            f"agent {self.number} of {self.size} on {socket.gethostname()} waited in vain for {name} in {self.folder}; "
            "check that all nodes started, and that they share this folder"
        )

    def _agent_file(self, number: int) -> Path:
        return self.folder / f"agent-{number:05d}.json"

    def _ended_file(self, number: int) -> Path:
        return self.round_folder / f"ended-{number:05d}.json"

    def _write(self, path: Path, facts: Mapping[str, object]) -> None:
        _make(path.parent)
        with files.storage(f"write {path}"):
            files.write_atomic(path, json.dumps(facts).encode())

    def _read(self, path: Path) -> dict[str, Any] | None:
        with suppress(FileNotFoundError):
            # reading the folder makes a network file system forget that the file was not there a moment ago
            list(path.parent.iterdir())
            found: dict[str, Any] = json.loads(path.read_bytes())
            return found
        return None


def seating(members: list[dict[str, Any]], number: int) -> Seating:
    """Where the ranks of agent `number` sit. Agents may bring different numbers of ranks, and share hosts.

    >>> members = [{"host": "a", "processes": 2, "port": 1}, {"host": "b", "processes": 1, "port": 2}]
    >>> seat = seating(members, 1)
    >>> seat.first_rank, seat.first_local_rank, seat.node, seat.world_size
    (2, 0, 1, 3)
    """
    hosts = list(dict.fromkeys(member["host"] for member in members))
    me = members[number]
    here = [member for member in members if member["host"] == me["host"]]
    before = members[:number]
    return Seating(
        first_rank=sum(member["processes"] for member in before),
        processes=me["processes"],
        world_size=sum(member["processes"] for member in members),
        first_local_rank=sum(member["processes"] for member in before if member["host"] == me["host"]),
        local_world_size=sum(member["processes"] for member in here),
        node=hosts.index(me["host"]),
        nodes=len(hosts),
        master=members[0]["host"] if len(hosts) > 1 else "127.0.0.1",
        port=members[0]["port"],
    )


def free_port() -> int:
    """A port that is free now. For scripts that make their process group themselves; headway's own need none."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _make(folder: Path) -> None:
    with files.storage(f"make {folder}"):
        for path in (folder.parents[1], folder.parent, folder):
            with suppress(FileExistsError):
                files.make_dir(path)
