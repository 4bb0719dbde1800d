"""Descriptions of where to run: what they refuse, and the way to YAML and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

import headway as hw
from headway import schedulers
from headway.errors import UsageError
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import KINDS, ClusterTarget, Slurm, read_target
from headway.schedulers.base import Scheduler
from headway.schedulers.slurm.time_limit import parse_time_limit

FULL: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": "a100:4",
    "cpus_per_task": 6,
    "mem": "64G",
    "time": "2:00:00",
    "partition": "gpu",
    "constraint": "[rack1|rack2]&nvlink",
    "exclusive": True,
    "array": ("lr=1e-3,3e-4",),
    "extra": {"licenses": "fluent:1", "mail_type": "END", "spread-job": True},
    "setup": ("module load cuda",),
    "env": {"GREETING": 'it\'s "$HOME"; a b\n-c'},
    "signal_lead": 90,
}


def test_they_are_public() -> None:
    assert (hw.Local, hw.Slurm, hw.Mpi) == tuple(KINDS.values())


@pytest.mark.parametrize(
    "target",
    [
        hw.Local(),
        hw.Local(nproc=4, device="cpu", env={"A": "b c"}),
        hw.Slurm(),
        hw.Slurm(**FULL),
        hw.Slurm(ntasks_per_node=8, extra={"gres": "gpu:8"}),
        hw.Mpi(nproc=4, hosts=("n1:2", "n2:2"), args=("--map-by", "ppr:2:node")),
    ],
    ids=str,
)
def test_to_yaml_and_back(target: hw.Local | hw.Slurm | hw.Mpi, tmp_path: Path) -> None:
    assert type(target).from_dict(target.to_dict()) == target
    file = tmp_path / "target.yaml"
    file.write_text(yaml.safe_dump(target.to_dict()))
    assert read_target(file) == target


@pytest.mark.parametrize("time", ["12:00:00", "30:00", "1-12:00:00", "0:45:00", "90"])
def test_a_time_needs_no_quotes(time: str, tmp_path: Path) -> None:
    """YAML 1.1 reads 12:00:00 as 43200, and SLURM would take that for minutes."""
    (tmp_path / "on.yaml").write_text(f"kind: slurm\nnodes: 2\ntime: {time}\n")
    assert read_target(tmp_path / "on.yaml") == hw.Slurm(nodes=2, time=time)


def test_defaults_are_not_written() -> None:
    assert hw.Slurm(nodes=2).to_dict() == {"kind": "slurm", "nodes": 2}


def test_names_may_be_written_as_slurm_writes_them() -> None:
    assert hw.Slurm.from_dict({"gpus-per-node": 2, "time": 90}) == hw.Slurm(gpus_per_node=2, time="90")


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 1),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": "a100:4"}, 4),
        ({"gpus_per_node": 4, "ntasks_per_node": 2}, 2),
        ({"gpus_per_node": 0}, 1),
        ({"ntasks_per_node": 3}, 3),
    ],
)
def test_ranks_of_a_node(settings: dict[str, Any], ranks: int) -> None:
    target = hw.Slurm(nodes=2, **settings)
    assert (target.nproc_per_node, target.nproc) == (ranks, 2 * ranks)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (hw.Local, {"nproc": 0}, "nproc=0 must be a whole number of at least 1"),
        (hw.Local, {"nproc": True}, "nproc=True must be a whole number"),
        (
            hw.Local,
            {"device": "tpu"},
            "device='tpu' is not a valid device; use one of auto, cpu, cuda, mps",
        ),
        (hw.Local, {"device": "mps", "nproc": 2}, "Apple's GPU serves one process"),
        (hw.Local, {"env": {"A=B": "c"}}, "'A=B' cannot be the name of a variable"),
        (hw.Local, {"env": {"RANK": "1"}}, "RANK is set by headway for each rank"),
        (hw.Local, {"env": ["A=b"]}, "must be a mapping"),
        (hw.Mpi, {"hosts": ("-x", "n1")}, "'-x' is not a host"),
        (hw.Mpi, {"hosts": "n1"}, "must be a list of strings"),
        (
            hw.Slurm,
            {"nodes": "two"},
            "nodes='two' must be a whole number of at least 1, or a range such as '1-2'",
        ),
        (hw.Slurm, {"nodes": "3-2"}, "nodes='3-2' must be a whole number of at least 1, or a range"),
        (hw.Slurm, {"nodes": "0-2"}, "nodes='0-2' must be a whole number of at least 1, or a range"),
        (hw.Slurm, {"nodes": "1-2\n"}, "must be a whole number of at least 1, or a range"),
        (hw.Slurm, {"nodes": True}, "nodes=True must be a whole number of at least 1, or a range"),
        (hw.Slurm, {"gpus_per_node": "4x"}, "neither a number nor TYPE:NUMBER"),
        (hw.Slurm, {"mem": "lots"}, "mem='lots' is not a valid amount of memory"),
        (hw.Slurm, {"time": "soon"}, "time='soon' is not a valid time limit"),
        (hw.Slurm, {"time": "1", "signal_lead": 60}, "time='1' is 60 s, but signal_lead=60"),
        (hw.Slurm, {"signal_lead": 70000}, "at most 65535 seconds"),
        (hw.Slurm, {"partition": "a b"}, "partition='a b' cannot be passed to SLURM"),
        (hw.Slurm, {"partition": "a\n#SBATCH --wrap=id"}, "cannot be passed to SLURM"),
        (hw.Slurm, {"account": "--wrap=id"}, "leading '-'"),
        (hw.Slurm, {"extra": {"nodes": 3}}, "nodes has a setting of its own: nodes=3"),
        (hw.Slurm, {"extra": {"output": "x"}}, "--output is set by headway"),
        (
            hw.Slurm,
            {"extra": {"ntasks": 4}},
            "--ntasks=4 does not say how many ranks each node gets; use --nodes",
        ),
        (
            hw.Slurm,
            {"extra": {"gpus": 4}},
            "--gpus=4 does not say how many ranks each node gets; use --gpus-per",
        ),
        (hw.Slurm, {"extra": {"gpus_per_task": 1}}, "use --gpus-per-node instead"),
        (hw.Slurm, {"extra": {"ntasks-per-gpu": 1}}, "use --nodes and --ntasks-per-node instead"),
        (hw.Slurm, {"extra": {"gres": "gpu:a100:4"}}, "--gres=gpu:a100:4 does not say how many ranks"),
        (hw.Slurm, {"extra": {"clusters": "b"}}, "submit from a login node of that cluster"),
        (hw.Slurm, {"extra": {"a b": "x"}}, "'a b' is not an option of sbatch"),
        (hw.Slurm, {"extra": {"comment": "x\ny"}}, "cannot be passed to SLURM"),
        (hw.Slurm, {"setup": "module load cuda"}, "must be a list of strings"),
        (hw.Slurm, {"max_requeues": -1}, "max_requeues=-1 must be a whole number of at least 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_range_of_nodes() -> None:
    target = hw.Slurm(nodes="2-4", ntasks_per_node=8)
    assert (target.nodes, target.node_range, target.nproc) == ("2-4", (2, 4), 32)
    assert Slurm.from_dict(target.to_dict()) == target
    assert hw.Slurm(nodes="3").nodes == hw.Slurm(nodes="3-3").nodes == 3
    with pytest.raises(
        UsageError, match="nodes='2-4': a function has a result of each rank, so their number is fixed"
    ):
        hw.launch(print, on=target)


@dataclass(frozen=True, kw_only=True)
class Elsewhere(ClusterTarget):
    """A target for another scheduler, as docs/launch.md shows one: it checks nothing itself."""

    kind: ClassVar[str] = f"{__name__}:Elsewhere"
    nodes: int | str = 1
    nproc_per_node: int = 1  # type: ignore[assignment]
    pre: tuple[str, ...] = ()

    @property
    def scheduler(self) -> Scheduler:
        return schedulers.load("slurm")

    def options(self) -> dict[str, Any]:
        return {}


def test_the_nodes_of_any_target_are_a_number_or_a_range() -> None:
    """`headway resume --nodes` gives each target what the user wrote."""
    assert Elsewhere(nodes="2-4").node_range == (2, 4)
    for nodes in ("two", "0", "4-2", ""):
        with pytest.raises(UsageError, match=f"nodes={nodes!r} must be a whole number of at least 1"):
            Elsewhere(nodes=nodes).request(name="x", directory=Path("/run"), log=Path("log/job.txt"))


def test_a_target_without_a_directory_for_data_stages_to_the_disk_of_its_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not to where the job happens to start."""
    job = JobFile(program=Program(command=["x"]), target=Elsewhere(pre=("/datasets/a",)))
    monkeypatch.setenv("SLURM_TMPDIR", "/scratch/7")
    assert job.staged_environment() == {"HEADWAY_STAGED": "/scratch/7"}
    monkeypatch.delenv("SLURM_TMPDIR")
    with pytest.raises(UsageError, match="pre_to=''"):
        job.staged_environment()


def test_a_wrong_key_is_named_with_the_nearest_right_one() -> None:
    with pytest.raises(
        UsageError, match=r"'node' is not a valid setting of slurm \(did you mean 'nodes'\?\)"
    ):
        Slurm.from_dict({"node": 2})


@pytest.mark.parametrize("text", ["[", "- 1", "nodes: 2", "kind: cloud", "kind: .cluster:Mine", "\xff"])
def test_a_file_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "on.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"on\.yaml"):
        read_target(tmp_path / "on.yaml")


@pytest.mark.parametrize(
    ("time", "expected"),
    [("1", 60), ("1:30", 90), ("1:00:01", 3601), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_time_limits_as_slurm_writes_them(time: str, expected: int) -> None:
    assert parse_time_limit(time) == expected
