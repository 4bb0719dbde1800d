"""The files that the agents of one launch write to its directory: their names, and how the job's script reads them.

Each file has one writer, and each decision is published once:

    prologue-00001.json      before the agents start: the node is being prepared; rewritten every few seconds
    agent-00001.json         host, number of ranks, agent 0's also an address; rewritten by a launch of the same name
    roster.json              from agent 0: all agents
    round-0/                 the ranks meet here (rendezvous.json); another round for each local restart
        failure.json         the first cause, from the ranks for their agents
        outcome.json         the first failure, or stop; the first agent to write it decides
        ended-00001.json     the ranks of this agent have ended
        reported.json        the outcome is printed: agents may exit
        restart.json         from agent 0: whether there is another round
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast, final

from headway.dist.failure.record import FailureRecord
from headway.errors import DONE
from headway.launcher.agent.environment import place_agent
from headway.run.info import read_json

ROSTER, OUTCOME, FAILURE = "roster.json", "outcome.json", "failure.json"
POLL_S = 0.1
Outcome = dict[str, Any]
"""exit_code, and the record of the failure if there is one"""


def agent_name(number: int) -> str:
    return f"agent-{number:05d}.json"


def preparation_name(number: int) -> str:
    return f"prologue-{number:05d}.json"


def ended_name(number: int) -> str:
    return f"ended-{number:05d}.json"


@final
class LaunchRecords:
    """The records of a launch, as the script of its job reads them.

    >>> LaunchRecords(Path("/tmp/x"), size=2).missing()
    (0, 1)
    """

    def __init__(self, directory: Path, *, size: int) -> None:
        self.directory, self.size = directory, size
        self._last_round = directory / "round-0"
        self.trouble: OSError | None = None
        """why the directory could not be listed the last time, so that some records may not have been seen"""

    @property
    def last_round(self) -> Path:
        numbers = [int(name[6:]) for name in self._names(self.directory) if re.fullmatch(r"round-\d+", name)]
        if numbers:
            self._last_round = self.directory / f"round-{max(numbers)}"
        return self._last_round

    def outcome(self) -> Outcome | None:
        """The record of the first agent to fail or stop in the last round."""
        return read_json(self.last_round / OUTCOME)

    def _names(self, directory: Path) -> list[str]:
        """Lists a directory; empty, with `trouble` set, if it cannot be listed."""
        self.trouble = None
        try:
            return [path.name for path in directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            self.trouble = error
            return []

    def ends(self) -> dict[int, int]:
        """The exit codes of the agents that have recorded their end, by number."""
        last = self.last_round
        found = {number: read_json(last / ended_name(number)) for number in range(self.size)}
        return {number: facts["exit_code"] for number, facts in found.items() if facts}

    def failure(self) -> FailureRecord | None:
        """The first cause that the ranks of the last round recorded."""
        found = read_json(self.last_round / FAILURE)
        return None if found is None else cast("FailureRecord", found)

    def preparations(self) -> dict[int, dict[str, Any]]:
        """The last record of each node that is being prepared for the ranks, by number."""
        found = {number: read_json(self.directory / preparation_name(number)) for number in range(self.size)}
        return {number: facts for number, facts in found.items() if facts}

    def is_prepared(self) -> bool:
        """Whether all nodes were prepared for the ranks, without a failure."""
        found = self.preparations()
        return len(found) == self.size and all(facts.get("exit_code") == DONE for facts in found.values())

    def settle(self, timeout_s: float) -> None:
        """Waits until all agents have recorded their end: a network file system may show a file seconds later."""
        deadline = time.monotonic() + timeout_s
        while self.missing() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def missing(self) -> tuple[int, ...]:
        """The agents that have not recorded their end."""
        last, trouble = self.last_round, self.trouble
        ended = set(self._names(last))
        self.trouble = self.trouble or trouble
        return tuple(number for number in range(self.size) if ended_name(number) not in ended)

    def host(self, number: int) -> str:
        """The host name that an agent recorded; a single agent is on the node of the job's script."""
        facts = read_json(self.directory / agent_name(number)) or self.preparations().get(number, {})
        return str(facts.get("host", socket.gethostname() if self.size == 1 else f"node {number}"))

    def hosts(self, numbers: Iterable[int]) -> str:
        """The host names of some agents, for messages."""
        return ", ".join(map(self.host, numbers))

    def agent_of(self, rank: int) -> int | None:
        """The agent that started a rank; None if there is no roster."""
        members = (read_json(self.directory / ROSTER) or {}).get("members", [])
        first = [place_agent(members, number).first_rank for number in range(len(members))]
        return max((number for number, begin in enumerate(first) if begin <= rank), default=None)
