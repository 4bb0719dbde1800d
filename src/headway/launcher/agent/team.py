"""The agents of one launch, one or more per node: they find each other, and agree on how it ended.

They watch each other (`team_watch`), and exchange records in a directory that all of them can write (`launch_records`).
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from headway.dist.failure.record import FailureRecord
from headway.dist.rendezvous import HubAddress
from headway.errors import HeadwayError, RankFailure, StorageError
from headway.launcher.agent.environment import AgentPlacement, place_agent
from headway.launcher.agent.launch_records import (
    FAILURE,
    OUTCOME,
    POLL_S,
    ROSTER,
    Outcome,
    agent_name,
    ended_name,
    preparation_name,
)
from headway.launcher.agent.team_watch import BEAT_S, SILENT_S, TeamWatch
from headway.system import files, ownership
from headway.system.log import logger

GATHER_TIMEOUT_S = 3600.0
"""how long agents wait for each other: one of them may have to copy data to its node first"""
_RESTART_TIMEOUT_S = 60.0
_REPORTED, _RESTART = "reported.json", "restart.json"
_LEFT = "left-*.json"


@final
class Team:
    """This agent's view of all agents.

    >>> team = Team(Path("/tmp/x"), number=0, size=1)
    """

    def __init__(
        self,
        directory: Path,
        *,
        number: int,
        size: int,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.directory = directory
        self._beat_s, self._silent_s = beat_s, silent_s
        self.number = number
        self.size = size
        self._round = 0
        self._members: list[dict[str, Any]] = []
        self._watch: TeamWatch | None = None
        self._trouble: OSError | None = None  # why the last read failed
        self.record_failed = False
        """whether a record of this agent could not be written, so that the other agents and the job may miss its end"""

    @property
    def round_dir(self) -> Path:
        return self.directory / f"round-{self._round}"

    @property
    def failure_file(self) -> Path:
        """Where the ranks of this round record the first cause for their agent: beside the rendezvous."""
        return self.round_dir / FAILURE

    def gather(
        self, nproc: int, *, host: str | None = None, timeout_s: float = GATHER_TIMEOUT_S
    ) -> AgentPlacement:
        """Waits for the other agents and returns where the ranks of this one are among all ranks."""
        me: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": host or socket.gethostname(),
            "nproc": nproc,
            "port": free_port(),
        }
        if self.size == 1:
            return place_agent([me], 0)
        watch = TeamWatch(
            self.number, size=self.size, host=me["host"], beat_s=self._beat_s, silent_s=self._silent_s
        )
        if watch.address is not None:
            me["watch"] = watch.address.to_json()
        try:
            self._members = self._find_members(me, time.monotonic() + timeout_s)
        except BaseException:
            watch.close()
            raise
        self._watch = watch
        watch.start(HubAddress.from_json(self._members[0]["watch"]))
        return place_agent(self._members, self.number)

    def _find_members(self, me: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Announces this agent; returns the announcements of all agents, from the roster that agent 0 writes."""
        self._write(self._agent_file(self.number), me)
        if self.number == 0:
            earlier = self._clear_earlier_launch()

            def is_new(announced: dict[str, Any]) -> bool:
                return announced["token"] not in earlier

            everyone = [
                self._expect(self._agent_file(number), deadline, is_new) for number in range(self.size)
            ]
            self._write(self.directory / ROSTER, {"members": everyone})
            return everyone

        def is_ours(roster: dict[str, Any]) -> bool:  # and not of an earlier launch of the same name
            members = roster["members"]
            return len(members) == self.size and bool(members[self.number]["token"] == me["token"])

        found: list[dict[str, Any]] = self._expect(self.directory / ROSTER, deadline, is_ours)["members"]
        return found

    def _clear_earlier_launch(self) -> set[str]:
        """Removes what a killed launch of the same name has left; returns the tokens of its agents."""
        if (roster := self._read(self.directory / ROSTER)) is None:
            return set()
        for path in self.directory.glob("round-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(_LEFT):
            path.unlink(missing_ok=True)
        return {str(member["token"]) for member in roster["members"]}

    def loss(self) -> FailureRecord | None:
        """Returns the failure record of an agent that is silent without having recorded the end of its ranks."""
        for number in self._watch.silent() if self._watch else ():
            assert self._watch is not None
            if self._read(self._ended_file(number)) is not None:
                self._watch.forget(number)
                continue
            if self._trouble is not None:  # its record may exist
                continue
            host = self._members[number]["host"]
            return {
                "kind": "lost",
                "rank": place_agent(self._members, number).first_rank,
                "host": host,
                "pid": None,
                "error": f"{host} is lost: its agent has been silent for {self._silent_s:g} s",
                "traceback": None,
                "exit_code": 1,
                "echo": False,
            }
        return None

    def end_watch(self) -> None:
        """Ends this agent's part in the watch over the others."""
        if self._watch is not None:
            self._watch.close()

    def begin_round(self, number: int) -> None:
        self._round = number
        _make(self.round_dir)

    def conclude(self, outcome: Outcome) -> bool:
        """Records how this round ended, unless another agent has; returns whether this agent was first.

        An agent that cannot write the record counts as the first.
        """
        path, first = self.round_dir / OUTCOME, True
        with self._noting_failure(), files.storage(f"write {path}"):
            first = files.publish(path, json.dumps(outcome).encode())
        return first

    def outcome(self) -> Outcome | None:
        """The record of the first agent to fail or stop in this round."""
        return self._read(self.round_dir / OUTCOME)

    def wait_outcome(self, timeout_s: float) -> None:
        """Waits until an agent has recorded how this round ended, at most `timeout_s`."""
        self._wait(self.round_dir / OUTCOME, timeout_s)

    def mark_ended(self, code: int) -> None:
        """Records for the other agents that the ranks of this one have ended."""
        self._try_to_write(self._ended_file(self.number), {"exit_code": code})

    def record_preparation(self, facts: Mapping[str, object]) -> None:
        """Records for the job's script that this node is being prepared: facts that change, then an exit code."""
        self._try_to_write(self.directory / preparation_name(self.number), facts)

    def fail(self, error: Exception) -> None:
        """Records that this agent itself failed, which ends the launch."""
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        sentence = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        host = socket.gethostname()
        record = {"kind": "agent", "host": host, "error": f"the agent on {host} failed: {sentence}"}
        with self._noting_failure():
            _make(self.round_dir)
        self.conclude({"exit_code": code, "record": record | {"sentence": sentence, "exit_code": code}})
        self.mark_ended(code)

    def wait_ended(self, timeout_s: float, *, unless: Callable[[], object]) -> None:
        """Waits until the ranks of all agents have ended, at most `timeout_s`: a lost node never records its end."""
        deadline = time.monotonic() + timeout_s
        missing = set(range(self.size)) - {self.number}
        while missing and time.monotonic() < deadline and not unless():
            missing = {number for number in missing if self._read(self._ended_file(number)) is None}
            if missing:
                time.sleep(POLL_S)

    def mark_reported(self) -> None:
        """Records for the other agents that the end of this round has been printed."""
        self._try_to_write(self.round_dir / _REPORTED, {})

    def wait_reported(self, timeout_s: float) -> None:
        """Waits until the first agent to fail has printed the cause, at most `timeout_s`: its node may be lost."""
        self._wait(self.round_dir / _REPORTED, timeout_s)

    def agree_on_restart(self, decide: Callable[[], bool], timeout_s: float = _RESTART_TIMEOUT_S) -> bool:
        """Lets agent 0 decide whether all agents start their ranks again; False without a decision in time."""
        if self.size == 1:
            return decide()
        if self.number == 0:
            restart = decide()
            self._try_to_write(self.round_dir / _RESTART, {"restart": restart})
            return restart and not self.record_failed
        decision = self._wait(self.round_dir / _RESTART, timeout_s)
        return decision is not None and bool(decision["restart"])

    def leave(self) -> None:
        """Removes the directory if this is the last agent to leave."""
        self._try_to_write(self.directory / f"left-{self.number:05d}.json", {})
        if len(list(self.directory.glob(_LEFT))) == self.size:
            shutil.rmtree(self.directory, ignore_errors=True)  # two may both be the last

    def _wait(
        self, path: Path, timeout_s: float, accept: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any] | None:
        """Waits for a record that `accept` approves of; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (found := self._read(path)) is None or not accept(found):
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)
        return found

    def _expect(
        self, path: Path, deadline: float, accept: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        found = self._wait(path, deadline - time.monotonic(), accept)
        if found is None:
            trouble = f" ({self._trouble.strerror or self._trouble})" if self._trouble else ""
            raise RankFailure(
                f"agent {self.number} of {self.size} on {socket.gethostname()} timed out waiting for {path.name} "
                f"in {self.directory}{trouble}; check that all nodes started, and that they share this directory"
            )
        return found

    def _agent_file(self, number: int) -> Path:
        return self.directory / agent_name(number)

    def _ended_file(self, number: int) -> Path:
        return self.round_dir / ended_name(number)

    def _write(self, path: Path, facts: Mapping[str, object]) -> None:
        _make(path.parent)
        with files.storage(f"write {path}"):
            files.write_atomic(path, json.dumps(facts).encode())

    def _try_to_write(self, path: Path, facts: Mapping[str, object]) -> None:
        with self._noting_failure():
            self._write(path, facts)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Logs that a record could not be written instead of raising, which would hide why the ranks ended."""
        try:
            yield
        except (OSError, StorageError) as error:
            if not self.record_failed:
                logger.error("the end of this agent could not be recorded: %s", error)
            self.record_failed = True

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Reads a record of another agent; None while it does not exist or cannot be read."""
        self._trouble = None
        try:
            if not files.is_listed(path):
                return None
            found: dict[str, Any] = json.loads(ownership.read_private(path))
            return found
        except (FileNotFoundError, json.JSONDecodeError):
            # without hard links, it is visible while it is written
            return None
        except OSError as error:  # callers poll, and so try again
            self._trouble = error
            return None


def free_port() -> int:
    """Returns a port that is free now, for scripts that make their own process group; headway's needs none."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _make(directory: Path) -> None:
    """Makes a directory, or checks that it is this user's: its records decide where the ranks connect."""
    with files.storage(f"make {directory}"):
        for path in (directory.parents[1], directory.parent, directory):
            with suppress(FileExistsError):
                files.make_dir(path)
    ownership.check_private(directory)
