"""Agents: where their ranks sit, what the ranks find around them, restarts, the end of it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import warm
from waiting import wait_until

from headway.data import pack
from headway.data.cache import node_cache
from headway.dist.failure import heartbeat
from headway.errors import RankFailure, StorageError
from headway.launcher import step
from headway.launcher.agent import environment, node, step_outcome, team as teams
from headway.launcher.agent.agent import Agent
from headway.launcher.agent.environment import cpu_shares, kernel_caches, private_directory, split_cpus
from headway.launcher.agent.launch_records import LaunchRecords, Outcome
from headway.launcher.agent.step_outcome import StepEnd, read_outcome
from headway.launcher.agent.team import Team
from headway.launcher.agent.team_watch import TeamWatch
from headway.system import ownership

AGENT = [sys.executable, "-m", "headway", "agent"]


def member(host: str, nproc: int) -> dict[str, object]:
    return {"host": host, "nproc": nproc, "port": 7, "token": ""}


def test_uneven_agents_that_share_hosts() -> None:
    members = [member("a", 2), member("b", 1), member("a", 3)]
    found = [environment.place_agent(members, number) for number in range(3)]
    assert [seat.first_rank for seat in found] == [0, 2, 3]
    assert [seat.first_local_rank for seat in found] == [0, 0, 2]
    assert [seat.local_world_size for seat in found] == [5, 1, 5]
    assert [(seat.node, seat.nodes, seat.world_size) for seat in found] == [(0, 2, 6), (1, 2, 6), (0, 2, 6)]
    assert {seat.master for seat in found} == {"a"}


def test_agents_meet_in_a_folder_where_an_earlier_launch_has_been(tmp_path: Path) -> None:
    old = [Team(tmp_path / "meet", number=number, size=2) for number in range(2)]
    _gather(old, [1, 1])
    new = [Team(tmp_path / "meet", number=number, size=2) for number in range(2)]
    assert [seat.world_size for seat in _gather(new, [2, 3])] == [5, 5]


def test_records_of_an_earlier_launch_that_was_killed_are_not_read(tmp_path: Path) -> None:
    old = [Team(tmp_path / "meet", number=number, size=2) for number in range(2)]
    _gather(old, [1, 1])
    for team in old:
        team.begin_round(0)
    old[1].conclude({"exit_code": 1, "record": None})
    old[1].mark_ended(1)
    old[1].leave()
    new = [Team(tmp_path / "meet", number=number, size=2) for number in range(2)]
    # the first agent waits for the second one, whose old announcement is still there
    assert [seat.world_size for seat in _gather(new, [2, 3], order=(0, 1))] == [5, 5]
    for team in new:
        team.begin_round(0)
    assert new[0].outcome() is None and new[0]._read(new[0]._ended_file(1)) is None
    new[0].leave()
    assert new[0].directory.exists(), "the second agent has not left"


def test_an_agent_that_fails_leaves_the_others_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "7")
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path))

    def fail(*_: object) -> int:
        raise StorageError("no space left for its directory")

    leave, heard = Team.leave, list[int]()

    def repeat_signal(team: Team) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # SLURM repeats it until all processes have ended
        leave(team)

    monkeypatch.setattr(Agent, "_run_in", fail)
    monkeypatch.setattr(Team, "leave", repeat_signal)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(StorageError):
            node.run_here(["true"], nproc=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == []
    assert [path.name for path in (tmp_path / ".agents-mpi-7").iterdir()] == ["left-00000.json"]


def _gather(
    agents: list[Team], nproc: list[int], order: Sequence[int] = (1, 0)
) -> list[environment.AgentPlacement]:
    found: dict[int, environment.AgentPlacement] = {}

    def meet(index: int) -> None:
        found[index] = agents[index].gather(nproc[index], timeout_s=60)

    def announcement(index: int) -> bytes:
        file = agents[index]._agent_file(index)
        return file.read_bytes() if file.exists() else b""

    def start(index: int) -> threading.Thread:
        before, thread = announcement(index), threading.Thread(target=meet, args=(index,))
        thread.start()
        wait_until(lambda: announcement(index) != before, "the agent has announced itself")
        return thread

    # the later agent first: the first one then finds both
    for thread in [start(index) for index in order]:
        thread.join()
    for agent in agents:
        agent.end_watch()  # else its thread lives as long as this process
    return [found[index] for index in range(len(agents))]


def test_an_agent_that_waits_in_vain_says_for_what(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"agent 0 of 2 .* timed out waiting for agent-00001\.json"):
        Team(tmp_path / "meet", number=0, size=2).gather(1, timeout_s=0.2)


def test_who_says_first_how_it_ended_decides(tmp_path: Path) -> None:
    first, second = (Team(tmp_path, number=number, size=2) for number in range(2))
    for each in (first, second):
        each.begin_round(0)
    assert second.conclude({"exit_code": 75, "record": None})
    assert not first.conclude({"exit_code": 1, "record": None})
    assert first.outcome() == {"exit_code": 75, "record": None}
    first.begin_round(1)
    assert first.outcome() is None


def test_a_record_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    """On a file system without hard links, it has its name before it has its contents."""
    team = Team(tmp_path, number=0, size=2)
    team.begin_round(0)
    (team.round_dir / "outcome.json").write_text('{"exit_code": 7')
    (team.round_dir / "outcome.json").chmod(0o600)
    assert team.outcome() is None
    (team.round_dir / "outcome.json").write_text('{"exit_code": 75, "record": null}')
    assert team.outcome() == {"exit_code": 75, "record": None}


def test_the_script_reads_the_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_outcome, "_SETTLE_S", 0.0)
    launch = tmp_path / "5-0"
    records = LaunchRecords(launch, size=2)

    def outcome(status: int) -> Outcome:
        return read_outcome(records, StepEnd(status=status))

    assert outcome(0)["exit_code"] == 1, "srun said 0, but nobody knows of an end"
    assert outcome(143)["exit_code"] == 1, "nor of having been told to go"
    early = outcome(128 + signal.SIGUSR2)
    assert early["exit_code"] == 75, "a stop request that came before the agents could hear it"
    agents = [Team(launch, number=number, size=2) for number in range(2)]
    _gather(agents, [1, 1])
    for number, code in ((9, 1), (10, 0)):
        for each in agents:
            each.begin_round(number)
        if code:
            agents[0].conclude({"exit_code": code, "record": None})
        agents[0].mark_ended(code)
    assert outcome(0)["exit_code"] == 1, "one agent has not said how it ended"
    agents[1].mark_ended(0)
    assert outcome(143)["exit_code"] == 0, "all ended well, whatever srun says"
    agents[0].mark_ended(143)
    assert outcome(143)["exit_code"] == 143, "all had to go"
    (launch / "round-10" / "ended-00001.json").unlink()
    assert outcome(143)["exit_code"] == 1, "one of them has died, and so the other had to go"
    agents[0].conclude({"exit_code": 75, "record": None})
    assert outcome(143)["exit_code"] == 75, "there is a checkpoint"


class StaleDirectory:
    """A directory of a network file system whose first lists, opens and reads fail, as those of NFS do for a while."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = str(directory)
        self.failures = 0
        for name in ("listdir", "scandir", "open"):
            monkeypatch.setattr(os, name, partial(self._call, getattr(os, name)))

    def _call(self, function: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if self.failures and str(path).startswith(self._directory):
            self.failures -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return function(path, *args, **options)


def test_a_launch_directory_that_cannot_be_read_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = tmp_path / "5-0"
    agents = [Team(launch, number=number, size=2) for number in range(2)]
    _gather(agents, [1, 1])
    for each in agents:
        each.begin_round(3)
    records, stale = LaunchRecords(launch, size=2), StaleDirectory(launch, monkeypatch)
    agents[0].conclude({"exit_code": 75, "record": None})
    for agent in agents:
        agent.mark_ended(75)
    assert records.missing() == () and records.last_round.name == "round-3"
    stale.failures = 1000
    assert agents[1].outcome() is None, "it is not known yet"
    monkeypatch.setattr(agents[1], "_watch", SimpleNamespace(silent=lambda: [0], forget=lambda _: None))
    assert agents[1].loss() is None, "it may have ended"
    assert records.outcome() is None and records.missing() == (0, 1) and records.last_round.name == "round-3"
    with pytest.raises(RankFailure, match=r"waiting for roster\.json in \S+ \(Stale file handle\); check"):
        agents[1]._expect(launch / "roster.json", time.monotonic())
    stale.failures = 8
    assert read_outcome(records, StepEnd(status=75))["exit_code"] == 75
    assert stale.failures == 0 and agents[1].outcome() == {"exit_code": 75, "record": None}
    monkeypatch.setattr(step_outcome, "_UNREADABLE_S", 0.0)
    stale.failures = 1000
    error = read_outcome(records, StepEnd(status=1))["record"]["error"]
    assert error.endswith(f"({launch} cannot be read: [Errno 116] Stale file handle: '{launch}')"), error


def test_a_step_outlives_a_launch_directory_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = StaleDirectory(tmp_path, monkeypatch)
    monkeypatch.setattr(step, "_READ_S", 0.0)
    stale.failures = 6
    ends: list[int | None] = [None, None, None, 75]
    waited = step.Step(1, LaunchRecords(tmp_path, size=1))
    monkeypatch.setattr(waited, "_poll", lambda: ends.pop(0))
    assert waited.wait() == StepEnd(status=75)


# ---- a node that is lost


class Node:
    """An agent in a process of its own, with one rank that does not use headway: only agents can notice its end."""

    def __init__(self, folder: Path, number: int, *, seconds: int) -> None:
        self.said, self._pid = folder / f"said-{number}", folder / f"pid-{number}"
        command = [
            "sh",
            "-c",
            f"echo $$ > {self._pid}.part; mv {self._pid}.part {self._pid}; exec sleep {seconds}",
        ]

        def run() -> None:
            with self.said.open("w", buffering=1) as sys.stderr:
                team = Team(folder / "meet", number=number, size=3, beat_s=0.1, silent_s=2.0)
                os._exit(Agent(command, nproc=1, team=team, host=f"node{number}").run())

        self.agent = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        self.agent.start()

    @property
    def rank(self) -> int:
        wait_until(self._pid.exists, "the rank runs")
        return int(self._pid.read_text())

    def signal(self, number: int) -> None:
        for pid in (self.agent.pid, self.rank):
            with suppress(ProcessLookupError):  # a rank ends with its agent
                os.kill(pid or 0, number)


def test_agents_of_a_suspended_job_do_not_miss_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [TeamWatch(number, size=2, host="127.0.0.1", beat_s=0.05, silent_s=60.0) for number in (0, 1)]
    address, clock, later = agents[0].address, time.monotonic, 0.0
    assert address is not None
    try:
        for agent in agents:
            agent.start(address)
        wait_until(lambda: all(agent._last_message for agent in agents), "they have heard each other")
        assert [agent.silent() for agent in agents] == [[], []]
        for agent in agents:
            agent.close()  # no beat comes any more
        time.sleep(0.2)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + later)
        later = 1000.0
        assert [agent.silent() for agent in agents] == [[], []], "all stood still"
        for _ in range(10):
            later += 5.0
            assert [agent.silent() for agent in agents] == [[], []]
        later += 5.0
        assert [agent.silent() for agent in agents] == [[1], [0]], "they had a minute to be heard again"
    finally:
        for agent in agents:
            agent.close()


def test_idle_connections_of_others_take_no_files_from_an_agent() -> None:
    """Everybody can connect to agent 0. Seen red with 300 files held for as many strangers."""
    agents = [TeamWatch(number, size=2, host="127.0.0.1", beat_s=0.05, silent_s=60.0) for number in (0, 1)]
    address = agents[0].address
    assert address is not None
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(agent.close)
        agents[0].start(address)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(300):
            stack.enter_context(socket.create_connection((address.hosts[-1], address.port), timeout=20))
        agents[1].start(address)
        wait_until(lambda: all(agent._last_message for agent in agents), "they have heard each other")
        wait_until(
            lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 300 + 128 + 8,
            "the oldest are closed",
        )


def test_an_agent_that_cannot_open_a_file_does_not_know_of_its_ranks_for_now(tmp_path: Path) -> None:
    heartbeat.heartbeat_file(tmp_path, 0).write_bytes(b"")
    team = Team(tmp_path, number=0, size=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        beat, outcome = heartbeat.read(tmp_path, 0), team.outcome()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert beat is None and outcome is None


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_node_that_is_lost_is_noticed_and_the_others_end(tmp_path: Path, lost: int, how: int) -> None:
    nodes = [Node(tmp_path, number, seconds=0 if number == 1 else 100) for number in range(3)]
    node, other = nodes[lost], nodes[2 - lost]
    try:
        nodes[1].agent.join(60)
        assert nodes[1].agent.exitcode == 0, "it has ended well, and nobody misses it"
        assert node.rank and other.rank
        time.sleep(2.0)  # several beats: the agents have heard each other
        node.signal(how)
        other.agent.join(40)
        assert other.agent.exitcode == 1
        said = other.said.read_text()  # agent 0 has also said that its name is not one address
        assert said.endswith(f"headway: node{lost} is lost: its agent has been silent for 2 s\n")
        assert len(said.splitlines()) == (1 if lost == 0 else 2)
        assert not psutil.pid_exists(other.rank)
        if how == signal.SIGSTOP:  # it was only slow, and finds that all is over
            node.signal(signal.SIGCONT)
            node.agent.join(40)
            assert node.agent.exitcode == 1 and not psutil.pid_exists(node.rank)
    finally:
        for each in nodes:
            each.signal(signal.SIGKILL)


# ---- what a rank finds


def test_cpus_are_shared_out_whole() -> None:
    assert split_cpus(range(8), 3) == [{0, 1, 2}, {3, 4, 5}, {6, 7}]
    assert split_cpus([4, 5], 3) is None, "more ranks than CPUs: the kernel decides"
    assert split_cpus([4, 5], 1) is None
    assert cpu_shares(1 + len(os.sched_getaffinity(0)), {"SLURM_STEP_ID": "0"}) is None
    assert cpu_shares(2, {}) is None, "without a scheduler the machine is not ours"


def test_threads_follow_what_slurm_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert environment.cores({}) == 64
    assert environment.cores({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_ID": "0"}) == 8
    assert environment.cores({"SLURM_CPUS_ON_NODE": "16", "SLURM_STEP_ID": "0"}) == 16
    assert environment.cores({"SLURM_CPUS_PER_TASK": "8"}) == 64, "a shell in an allocation is not a task"


def test_kernels_are_kept_apart_on_the_nodes_disk(tmp_path: Path) -> None:
    around = {"SLURM_TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "mine"}
    (found,) = kernel_caches(3, around).items()
    assert found == ("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"headway-{os.geteuid()}" / "inductor-3"))
    assert kernel_caches(3, {"SLURM_TMPDIR": str(tmp_path / "nowhere")}) == {}


def test_a_folder_that_others_could_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = private_directory(tmp_path)
    assert folder is not None
    assert private_directory(tmp_path) == folder
    assert caplog.text == ""
    folder.chmod(0o777)
    for _ in range(3):  # ranks
        assert private_directory(tmp_path) is None
    owner = ownership.user(os.geteuid())
    assert caplog.text.count(f"{folder} has mode drwxrwxrwx and belongs to {owner}; it is not used") == 1
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert private_directory(tmp_path) is None


# ---- restarts

CRASHES = """
import json, os, sys
from pathlib import Path
run = Path(os.environ["HEADWAY_RUN"])
starts = len(list(run.glob("start-*")))
(run / f"start-{starts}").touch()
step = run / "checkpoints" / f"step-{starts + 1:012d}"
if starts < int(sys.argv[1]):  # progress
    step.mkdir()
    (step / "manifest.json").touch()
sys.exit(0 if starts == 5 else int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("progress", "code", "most", "starts", "expected"),
    [
        pytest.param(9, 1, 9, 6, 0, id="each made progress, until one ended well"),
        pytest.param(2, 1, 9, 3, 1, id="the third made none"),
        pytest.param(9, 1, 2, 3, 1, id="two restarts at most"),
        pytest.param(9, 75, 9, 1, 75, id="a stop is no crash"),
        pytest.param(9, 86, 9, 1, 86, id="nor is it a crash that no checkpoint is whole"),
    ],
)
def test_restarts_only_after_progress(
    tmp_path: Path, progress: int, code: int, most: int, starts: int, expected: int
) -> None:
    (tmp_path / "checkpoints").mkdir()
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    command = [sys.executable, str(script), str(progress), str(code)]
    environ = os.environ | {"HEADWAY_RUN": str(tmp_path)}
    assert Agent(command, nproc=1, environ=environ, max_restarts=most).run() == expected
    assert len(list(tmp_path.glob("start-*"))) == starts


# ---- stopping

STOPS = """
import os, signal, sys, time
time.sleep(float(sys.argv[1]))
stop = []
signal.signal(signal.SIGUSR2, lambda *_: stop.append(1))
open(f"ready-{os.environ['RANK']}", "w").close()
while not stop: time.sleep(0.05)
sys.exit(75)
"""


def test_a_stop_request_that_comes_too_early_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    agent = subprocess.Popen(
        [*AGENT, "--nproc", "2", "stops.py", "4"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    started = lambda: len(psutil.Process(agent.pid).children()) == 2  # noqa: E731  which are not ready to hear
    wait_until(started, "the agent has started its ranks")
    agent.send_signal(12)
    _, error = agent.communicate(timeout=180)
    assert (agent.returncode, error.count("\n")) == (75, 1), error
    assert "stopped with a checkpoint" in error
    assert len(list(tmp_path.glob("ready-*"))) == 2, "the early request has killed no rank"


def test_a_rank_that_hears_it_twice_while_it_exits_has_stopped(tmp_path: Path) -> None:
    exits = STOPS.replace("sys.exit(75)", "signal.signal(signal.SIGUSR2, signal.SIG_DFL); time.sleep(100)")
    (tmp_path / "exits.py").write_text(exits)
    agent = subprocess.Popen([*AGENT, "exits.py", "0"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_until((tmp_path / "ready-0").exists, "the rank is ready")
    agent.send_signal(12)
    time.sleep(1)
    agent.send_signal(12)
    assert agent.wait(timeout=180) == 75


def test_an_agent_says_its_usage(tmp_path: Path) -> None:
    environ = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = subprocess.run(
        [*AGENT, __file__], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 2
    assert "an agent starts ranks, and torchrun has started this process as one" in done.stderr


def test_variables_of_the_ranks(tmp_path: Path) -> None:
    # one write for each line: with PYTHONUNBUFFERED print makes two, and another rank's may come in between
    show = "import json, os, sys; sys.stdout.write(json.dumps({n: os.environ.get(n) for n in %r}) + chr(10))"
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"]
    (tmp_path / "show.py").write_text(show % (names,))
    done = subprocess.run(
        [*AGENT, "--nproc", "2", "show.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda rank: rank["RANK"])
    assert [list(rank.values()) for rank in found] == [
        [str(rank), str(rank), "2", "0", "1", "127.0.0.1"] for rank in range(2)
    ]


@pytest.mark.timeout(240)
def test_jobs_that_start_at_once_do_not_meet(tmp_path: Path) -> None:
    """Three whose rank 0 takes a port of the kernel's choice, and seven that are given one by the agent, and hold it
    until all have theirs."""
    given = 7
    (tmp_path / "meets.py").write_text(
        "import os, pathlib, socket, time\n"
        "server = socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
        "pathlib.Path(f'got-{os.getpid()}').touch()\n"
        f"while len(list(pathlib.Path().glob('got-*'))) < {given}: time.sleep(0.02)\n"
        "print('got it')\n"
    )
    who = str(Path(__file__).parents[1] / "scripts" / "who.py")
    command = [sys.executable, "-m", "headway", "run"]
    jobs = [[*command, "--nproc", "2", who]] * 3 + [[*command, "meets.py"]] * given
    running = [
        warm.Popen(job, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for job in jobs
    ]
    try:
        for number, job in reversed([*enumerate(running)]):
            out, error = job.communicate(timeout=100)
            assert job.returncode == 0, error
            assert out.count("sum 3") == 2 if number < 3 else "got it" in out
    finally:
        for job in running:
            job.terminate()
            job.communicate(timeout=180)


def test_a_free_port_is_free() -> None:
    assert len({teams.free_port() for _ in range(20)}) > 1


def test_copies_of_killed_ranks_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "NodeCache", partial(node_cache.NodeCache, path=tmp_path))
    pack([{"__key__": "a", "bin": bytes(9000)}], tmp_path / "shards")
    job = f"""
import os
from pathlib import Path
from headway.data.cache import node_cache as cache
copies = cache.CachedShards(cache.NodeCache(path={str(tmp_path)!r}, copy_local=True, min_age=0))
copies.open(Path({str(tmp_path / "shards" / "shard-000000.tar")!r}))
assert copies.counts["copied"] == 1
Path({str(tmp_path / "copied")!r}).touch()
os.kill(os.getpid(), 9)
"""
    assert Agent([sys.executable, "-c", job], nproc=1, environ=dict(os.environ)).run() != 0
    assert (tmp_path / "copied").exists()
    assert not list(tmp_path.glob("headway-cache-*"))
