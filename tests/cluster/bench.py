"""A real Slurm cluster on this machine, as a Python object: start it, run commands, hurt its nodes, end it.

    cluster = Cluster.up()
    cluster.srun("-N2", "hostname").stdout      # 'n1\\nn2\\n'
    job = cluster.sbatch("srun -N4 hostname", "-N4")
    cluster.wait(job)                           # 'COMPLETED'
    cluster.output(job)                         # 'n1\\nn2\\n...'
    cluster.down()

The work is done by up.sh, node.sh and down.sh beside this file. Every command has a time limit, after which
it is killed with all its children.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # also where tests run this file by itself
from waiting import describe_load

HERE = Path(__file__).resolve().parent
ROOT = Path(f"/tmp/hw-bench-{os.getuid()}")  # short, as sockets live below it
PORTS = range(17000, 27000, 100)
# By names that mean one thing only: both bring a `mpirun`.
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
MPICH = (str(Path(sys.executable).with_name("mpiexec")),)
LIMIT_S = 150.0
"""for a command, a job or a node: ten processes that import torch take a minute on a busy machine"""
FINISHED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}
)
# States that a requeued job never passes through: waiting longer for another one is useless.
FINAL = FINISHED - {"NODE_FAIL", "PREEMPTED"}


def why_not(proctrack: str = "linuxproc") -> str | None:
    """Why no cluster can be started here, in one line; None if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    needed = ("slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "nsenter", OPEN_MPI[0])
    if missing := [name for name in needed if not shutil.which(name, path=path)]:
        return f"not installed: {' '.join(missing)} (scripts/install-services.sh installs them)"
    probe = "unshare --net --uts --mount --ipc --pid --fork --mount-proc ip link add probe type bridge"
    if subprocess.run(probe.split(), env={"PATH": path}, capture_output=True, timeout=20).returncode:
        return "namespaces are not allowed for this user (try tests/cluster/rootless.sh python -m pytest ...)"
    probe = "unshare --mount mount -t cgroup -o freezer none /tmp"
    if proctrack == "cgroup" and subprocess.run(probe.split(), capture_output=True, timeout=20).returncode:
        return "the freezer of cgroup v1 cannot be mounted by this user on this kernel"
    return None


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float = 180,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command; after `timeout` seconds kill it with all its children and fail, quoting its output."""
    command = [str(word) for word in argv]
    with subprocess.Popen(
        command,
        # mpiexec of MPICH dies of SIGPIPE where it learns of the end of its input just as its ranks end
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin or None, timeout)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            stdout, stderr = process.communicate(timeout=10)
            late = f"ran out of time after {timeout} s ({describe_load()})"
            raise AssertionError(_told(command, late, stdout, stderr)) from None
        except BaseException:  # the test's own time limit, Ctrl-C: leave nothing behind
            _kill(process.pid)
            raise
    if check and process.returncode:
        raise AssertionError(_told(command, f"exit status {process.returncode}", stdout, stderr))
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(pid: int) -> None:
    """Kill a process, its group, and all below it: launchers put their ranks into groups of their own."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os.killpg(pid, signal.SIGKILL)


def _told(command: Sequence[str], what: str, stdout: str, stderr: str) -> str:
    return f"{' '.join(command)}: {what}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a cluster; `crash` and `cut` stay until `start` and `mend` (or the end of the test)."""

    name: str
    address: str
    port: int
    cluster: Cluster = field(repr=False)

    def crash(self) -> None:
        """Kill every process on the node at once, as a power cut would. Slurm takes 25 s to notice, or three to four
        times the `patience` of the cluster."""
        self._do("crash")

    def start(self) -> None:
        """Start the node after a crash; return when it takes jobs."""
        self._do("start")
        self._until_ready()

    def cut(self) -> None:
        """Take the node's network away; its processes go on running."""
        self._do("cut")

    def mend(self, timeout: float = LIMIT_S) -> None:
        """Give the network back; return when the node takes jobs."""
        self._do("mend")
        if self.state().startswith("down"):  # Slurm would look again after half a minute
            self._update("state=resume")
        self._until_ready(timeout)

    def down(self) -> None:
        """Tell Slurm that the node is lost, the fast way to a node failure; no job gets it until `up`."""
        # drained too, as a node that is only down comes back with its next sign of life, which is at once
        self._update("state=drain", "reason=test")
        self._update("state=down", "reason=test")

    def up(self) -> None:
        """Take `down` back; return when the node takes jobs."""
        self._update("state=resume")
        self._until_ready()

    def state(self) -> str:
        """As sinfo says: idle, mixed, alloc, down, ...; with a `*` if the node does not answer."""
        return self.cluster.run(
            ["sinfo", "-hN", "-p", "low", "-n", self.name, "-o", "%T"], check=True
        ).stdout.strip()

    def run(self, *argv: str | Path, timeout: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command on the node, outside Slurm."""
        return self.cluster.run([HERE / "node.sh", "enter", self.name, *argv], timeout=timeout)

    def is_crashed(self) -> bool:
        """Whether it has crashed and was not started since."""
        return (
            self.cluster.mode != "plain"
            and not self.cluster.lab.joinpath(f"pids/node-{self.name}.pid").exists()
        )

    def is_cut(self) -> bool:
        """Whether its network is taken away."""
        link = f"hw{self.cluster.port}{self.name}"
        return self.cluster.mode == "net" and not psutil.net_if_stats()[link].isup

    def _do(self, action: str) -> None:
        self.cluster.run([HERE / "node.sh", action, self.name], check=True)

    def _update(self, *settings: str) -> None:
        self.cluster.run(["scontrol", "update", f"nodename={self.name}", *settings], check=True)

    def _until_ready(self, timeout: float = LIMIT_S) -> None:
        limit = time.monotonic() + timeout
        while not (self.state() in {"idle", "mixed", "allocated"} and self._answers()):
            assert time.monotonic() < limit, (
                f"ran out of time after {timeout} s ({describe_load()}): {self.name} is still {self.state()!r}"
            )
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), timeout=1).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster: nodes n1, n2, ... of 4 CPUs and 2 fake GPUs; partitions `low` (default), `high`."""

    lab: Path
    port: int
    names: tuple[str, ...]
    proctrack: str
    mode: str
    owner: TextIO = field(repr=False)

    @classmethod
    def up(
        cls, *, nodes: int = 4, proctrack: str = "linuxproc", mode: str = "net", patience: int = 10
    ) -> Cluster:
        """Start a cluster on a free block of ports; first end what killed suites have left behind."""
        with _registry():
            _reap()
            port, owner = _claim(nodes)
        names = tuple(f"n{number}" for number in range(1, nodes + 1))
        lab = ROOT / str(port)
        cluster = cls(lab=lab, port=port, names=names, proctrack=proctrack, mode=mode, owner=owner)
        settings = {"PORT": str(port), "NODES": str(nodes), "MODE": mode, "PROCTRACK": proctrack}
        settings["PATIENCE"] = str(patience)
        try:
            run([HERE / "up.sh"], env=cluster.environment(settings), check=True)
            cluster.work.mkdir()
        except BaseException as error:
            error.add_note(cluster.logs())
            cluster.down()
            raise
        return cluster

    def down(self) -> None:
        """End every process of the cluster and remove all that belongs to it."""
        with _registry(), self.owner:
            _down(self.lab)

    @property
    def work(self) -> Path:
        """A directory that all nodes see; commands and jobs run there unless told otherwise."""
        return self.lab / "work"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, aimed at the cluster and rid of any outer Slurm job's variables."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        kept["PATH"] = f"{kept.get('PATH', '')}:/usr/sbin:/sbin"
        return kept | {"LAB": str(self.lab), "SLURM_CONF": str(self.lab / "slurm.conf")} | dict(extra or {})

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run any command (srun, mpirun, python ...) against this cluster; `env` adds to the environment.

        Fails when it takes longer than `timeout` seconds, and, with `check`, when its exit status is not 0.
        """
        environment = self.environment(env)
        return run(argv, timeout=timeout, env=environment, cwd=cwd or self.work, stdin=stdin, check=check)

    def srun(
        self,
        *args: str | Path,
        timeout: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """`srun ARGS`, for example `cluster.srun("-N2", "-n4", sys.executable, script)`."""
        return self.run(["srun", *args], timeout=timeout, env=env, check=check)

    def sbatch(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> int:
        """Submit a batch script (its `#!` line may be left out) and return the job's number."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        command = ["sbatch", "--parsable", f"--output={self.work}/job-%j.txt", *options]
        return int(self.run(command, stdin=text, env=env, check=True).stdout)

    def state(self, job: int) -> str:
        """The job's state, in capitals as Slurm writes it; also of a job that has ended."""
        return self.run(["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T"], check=True).stdout.strip()

    def wait(self, job: int, states: str | Collection[str] = FINISHED, timeout: float = LIMIT_S) -> str:
        """Wait until the job is in one of the states (default: it has ended) and return the state."""
        wanted = {states} if isinstance(states, str) else set(states)
        limit = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            if state in FINAL or time.monotonic() > limit:
                aim = " or ".join(sorted(wanted))
                late = "" if state in FINAL else f"ran out of time after {timeout} s ({describe_load()}): "
                raise AssertionError(
                    f"{late}job {job} is {state}, not {aim}; its output:\n{self.output(job)}"
                )
            time.sleep(0.25)  # each look is a process
        return state

    def output(self, job: int) -> str:
        """What the job has written so far, stdout and stderr together."""
        path = self.work / f"job-{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def restarts(self, job: int) -> int:
        """How often the job has been requeued."""
        shown = self.run(["scontrol", "-o", "show", "job", str(job)], check=True).stdout
        return int(shown.partition("Restarts=")[2].split()[0])

    def cancel(self, job: int, *options: str) -> None:
        """`scancel OPTIONS JOB`, for example `cluster.cancel(job, "--signal=USR1")`."""
        self.run(["scancel", *options, str(job)], check=True)

    def node(self, name: str) -> Node:
        """The node of that name."""
        number = self.names.index(name) + 1
        host = f"10.213.{self.port // 100 % 250}.{number}" if self.mode == "net" else f"127.0.0.{10 + number}"
        return Node(name=name, address=host, port=self.port + number, cluster=self)

    def reset(self, timeout: float = LIMIT_S) -> None:
        """Undo what a test may have left: repair all nodes, cancel all jobs, empty `work`."""
        nodes = [self.node(name) for name in self.names]
        for node in nodes:
            if node.is_crashed():
                node._do("start")
            if node.is_cut():
                node._do("mend")
        limit = time.monotonic() + timeout
        while not self._is_idle():
            assert time.monotonic() < limit, (
                f"ran out of time after {timeout} s ({describe_load()}): the cluster is not idle\n{self.logs()}"
            )
            self.run(["scancel", "--quiet", "--me"])
            for node in nodes:
                if node.state().startswith(("down", "drain")):
                    self.run(["scontrol", "update", f"nodename={node.name}", "state=resume"])
            time.sleep(0.2)
        run(["find", self.work, "-mindepth", "1", "-delete"], check=True)

    def _is_idle(self) -> bool:
        jobs = self.run(["squeue", "-h"], check=True).stdout.split()
        states = self.run(["sinfo", "-hN", "-p", "low", "-o", "%T"], check=True).stdout.split()
        return not jobs and set(states) == {"idle"}

    def logs(self, lines: int = 15) -> str:
        """The ends of all daemons' logs."""
        parts = []
        for path in sorted((self.lab / "log").glob("*")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- {path.name}", *tail] if tail else []
        return "\n".join(parts)


_registry_holds: list[int] = []
"""the open directory of the registry, while this process holds its lock"""


@contextmanager
def _registry() -> Iterator[None]:
    """Hold the one lock under which suites on this machine claim and free blocks of ports; who has it may ask again."""
    if _registry_holds:
        yield
        return
    ROOT.mkdir(mode=0o755, exist_ok=True)
    assert ROOT.lstat().st_uid == os.getuid(), f"{ROOT} belongs to somebody else"
    descriptor = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _registry_holds.append(descriptor)
        yield
    finally:
        _registry_holds.clear()
        os.close(descriptor)


def _reap() -> None:
    """End clusters whose suite was killed: nobody holds the lock on their `owner` file any more.

    A lock, not a pid: it is true across PID namespaces, and no stranger can come to bear it.
    """
    for lab in ROOT.iterdir():
        with (lab / "owner").open("a") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _down(lab)


def _down(lab: Path) -> None:
    run([HERE / "down.sh"], env={**os.environ, "LAB": str(lab)}, check=True)
    shutil.rmtree(lab, ignore_errors=True)  # down.sh leaves a directory in which nothing was started


def _claim(nodes: int) -> tuple[int, TextIO]:
    """A block of ports that nobody uses, and the open, locked `owner` file that makes it ours."""
    for port in PORTS:
        lab = ROOT / str(port)
        if lab.exists() or f"hw{port}" in psutil.net_if_stats():
            continue
        if not all(_is_free(port + offset) for offset in range(nodes + 1)):
            continue
        lab.mkdir()
        owner = (lab / "owner").open("w")
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(f"{os.getpid()}\n")
        owner.flush()
        return port, owner
    raise AssertionError(f"no free block of ports between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
