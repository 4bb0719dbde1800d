"""Submitting scripts to the test cluster as a user would, and reading what their runs have left."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import warm
from waiting import wait_until

from headway.record import ledger
from headway.run import Run

from .bench import Cluster

Result = tuple[dict[int, tuple[str | None, str | None, str]], str]
_NEVER_AGAIN = {"FAILED", "CANCELLED", "TIMEOUT"}
"""states from which a job does not come back"""
HEADWAY = str(Path(sys.executable).with_name("headway"))
SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job of the cluster, and its run directory."""

    cluster: Cluster
    job: int
    path: Path

    @property
    def log(self) -> str:
        """What the job has printed so far, in all its starts."""
        file = self.path / "log" / "job.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, states: str | set[str] | None = None, timeout: float = 100) -> str:
        """As `Cluster.wait`, quoting the job's own log."""
        try:
            return self.cluster.wait(self.job, *([states] if states else []), timeout=timeout)
        except AssertionError as error:
            error.add_note(self.log)
            raise

    def until(self, holds: Callable[[], object], what: str, timeout: float = 100) -> None:
        def is_so_or_never_will_be() -> bool:
            return bool(holds()) or set(self.cluster.state(self.job).split()) <= _NEVER_AGAIN

        wait_until(is_so_or_never_will_be, what, timeout_s=timeout, interval_s=0.25, explain=lambda: self.log)
        assert holds(), f"{what}: the job is {self.cluster.state(self.job)}\n{self.log}"

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step, f"step {step}")

    def steps(self) -> int:
        """The last step whose loss was written."""
        return max(self.losses(), default=-1)

    def losses(self) -> dict[int, str]:
        """Each step's loss; a step that was made twice must have had the same one."""
        found: dict[int, str] = {}
        file = self.path / "losses.txt"
        for line in file.read_text().splitlines() if file.exists() else ():
            step, _, loss = line.partition(" ")
            assert found.setdefault(int(step), loss) == loss, f"step {step} was made twice, differently"
        return found

    def result(self) -> Result:
        """What each step saw and did, by the run's ledger, and the last weights."""
        rows = ledger.load(Run.open(self.path)).last
        told = {step: (row.loss, row.samples, row.random) for step, row in rows.items()}
        assert len(told) == len(self.losses())
        return told, (self.path / "weights.txt").read_text()

    def attempts(self) -> list[tuple[str, int]]:
        """How each attempt ended, and at which step it began."""
        facts = json.loads((self.path / "run.json").read_bytes())["attempts"]
        return [(attempt["status"], attempt.get("step_started") or 0) for attempt in facts]


def submit(
    cluster: Cluster,
    script: Path | str,
    *arguments: str,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> list[Submitted]:
    """`headway submit OPTIONS SCRIPT ARGUMENTS` from a folder of its own on the cluster."""
    project = cluster.work / "project"
    project.mkdir(exist_ok=True)
    if isinstance(script, Path):
        shutil.copy(script, project)
        script = script.name
    done = cluster.run(
        [HEADWAY, "submit", "--json", *options, script, *arguments], cwd=project, env=env, check=True
    )
    facts = json.loads(done.stdout)
    return [Submitted(cluster=cluster, job=int(facts["job_id"]), path=Path(path)) for path in facts["runs"]]


def local_result(folder: Path, script: Path, nproc: int) -> Result:
    """What the script gives on this machine, uninterrupted."""
    command = [HEADWAY, "run", "--nproc", str(nproc), str(script)]
    done = warm.run(command, cwd=folder, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "runs").glob("*-*")
    return Submitted(cluster=None, job=0, path=path).result()  # type: ignore[arg-type]
