"""The doctor: correct verdicts from facts, advice for every verdict that is not ok, and the facts of this machine."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from rich.console import Console

from headway.cli import doctor as command, main as headway
from headway.dist.topology.machine import GpuLink, Port, Topology
from headway.dist.topology.nvml import Driver, Gpu
from headway.doctor import checks as doctor, probes
from headway.doctor.checks import CheckResult, MachineReport
from headway.doctor.probes import ProgramOutput
from headway.schedulers.base import Health
from headway.system.limits import MemoryLimit

GIB = 2**30
DRIVER = Driver(version="570.86", cuda=(12, 8))
CARD = Gpu(index=0, name="H100", memory=80 * GIB, uuid="", pci="0000:01:00.0")
BARE = Topology(host="box", address="10.0.0.5")
ONE = replace(BARE, gpus=[CARD])
PORT = Port(device="mlx5_0", port=1, active=True, gbits=400.0, layer="InfiniBand")
NO_LIMIT = resource.RLIM_INFINITY


def switched(*counts: int) -> Topology:
    links = [GpuLink(a=0, b=b, kind="nvlink", count=count, via="switch") for b, count in enumerate(counts, 1)]
    return replace(BARE, gpus=[CARD] * (len(counts) + 1), links=links)


# ---- verdicts from facts

VERDICTS = [
    (doctor.python(), "ok", f"{platform.python_version()} at "),
    (
        doctor.packages({"torch": "2.11", "rich": "13.7"}, {"torch": "2.13.0+cpu", "rich": "13.7"}),
        "ok",
        "torch 2.13.0",
    ),
    (doctor.packages({"torch": "2.11"}, {"torch": "2.9.1"}), "bad", "torch 2.9.1 is too old"),
    (doctor.packages({"torch": "2.11", "rich": "0.9"}, {"torch": "2.11"}), "bad", "rich is missing"),
    (doctor.gpus(BARE, None, torch_cuda=None, device_files=0), "ok", "training uses the CPU"),
    (
        doctor.gpus(BARE, None, torch_cuda=None, device_files=0, device="mps"),
        "ok",
        "the GPU of this Mac (mps)",
    ),
    (doctor.gpus(BARE, None, torch_cuda=None, device_files=0, device="cuda"), "ok", "AMD"),
    (doctor.gpus(BARE, None, torch_cuda="12.8", device_files=8), "bad", "/dev has 8"),
    (doctor.gpus(BARE, DRIVER, torch_cuda="12.8", device_files=8), "warn", "may use none of them"),
    (doctor.gpus(ONE, DRIVER, torch_cuda="12.8", device_files=1), "ok", "1 x H100, 80 GiB, driver 570.86"),
    (
        doctor.gpus(ONE, DRIVER, torch_cuda="12.9", device_files=1),
        "ok",
        "torch with CUDA 12.9",
    ),  # minor versions mix
    (doctor.gpus(ONE, DRIVER, torch_cuda="13.0", device_files=1), "bad", "CUDA up to 12.8"),
    (doctor.gpus(ONE, DRIVER, torch_cuda=None, device_files=1), "bad", "built without CUDA"),
    (doctor.gpu_links(switched(18, 18)), "ok", "all pairs by 18 NVLinks"),
    (doctor.gpu_links(switched(18, 12)), "warn", "0-2 (12 of 18)"),
    (doctor.infiniband(replace(BARE, ports=[PORT]), locked_memory=NO_LIMIT), "ok", "400 Gb/s"),
    (doctor.infiniband(replace(BARE, ports=[PORT]), locked_memory=8 << 20), "warn", "limited to 8 MiB"),
    (
        doctor.infiniband(replace(BARE, ports=[PORT, replace(PORT, active=False)]), locked_memory=NO_LIMIT),
        "warn",
        "down: mlx5_0 port 1",
    ),
    (
        doctor.infiniband(replace(BARE, ports=[PORT, replace(PORT, active=False)]), locked_memory=8 << 20),
        "warn",
        "down: mlx5_0 port 1; locked memory is limited to 8 MiB",
    ),
    (doctor.host_name(BARE, cluster=True), "ok", "10.0.0.5"),
    (doctor.host_name(replace(BARE, address=None), cluster=False), "warn", "does not resolve"),
    (doctor.host_name(replace(BARE, address="127.0.1.1"), cluster=False), "ok", "127.0.1.1"),
    (doctor.host_name(replace(BARE, address="127.0.1.1"), cluster=True), "warn", "cannot reach"),
    (doctor.cpus(64, 64, gpus=8), "ok", "64"),
    (doctor.cpus(1, 64, gpus=0), "ok", "1 of 64 usable"),
    (doctor.cpus(4, 64, gpus=4), "warn", "4 of 64 usable, for 4 GPUs"),
    (doctor.host_memory(64 * GIB, 32 * GIB, limit=None), "ok", "32.0 of 64.0 GiB free"),
    (doctor.host_memory(64 * GIB, GIB, limit=None), "warn", "1.0 of 64.0"),
    (doctor.host_memory(64 * GIB, 32 * GIB, limit=GIB), "warn", "may use 1.0"),
    (doctor.shared_memory(None), "bad", "does not exist"),
    (doctor.shared_memory(64 << 20), "warn", "64 MiB"),
    (doctor.shared_memory(GIB), "ok", "1.0 GiB"),
    (doctor.open_files(1024, 524288), "warn", "at most 1024"),
    (doctor.open_files(4096, 4096), "ok", "at most 4096"),
    (doctor.open_files(NO_LIMIT, NO_LIMIT), "ok", "no limit"),
    (doctor.run_root_disk(Path("/runs"), "lustre", free=900 * GIB), "ok", "/runs on lustre, 900 GiB free"),
    (doctor.run_root_disk(Path("/runs"), "tmpfs", free=900 * GIB), "warn", "tmpfs"),
    (doctor.run_root_disk(Path("/runs"), "nfs4", free=5 * GIB), "warn", "5 GiB free"),
    (doctor.run_root_disk(Path("/runs"), "tmpfs", free=GIB // 2), "bad", "0 GiB free"),
    (doctor.fsync_time(0.005), "ok", "5.0 ms"),
    (doctor.fsync_time(0.2), "warn", "200.0 ms"),
    (doctor.clock(0.01), "ok", "agrees"),
    (doctor.clock(-30.0), "warn", "30 s behind"),
    (doctor.clock(30.0), "warn", "30 s ahead"),
    (doctor.scheduler("SLURM", None), "ok", "not installed"),
    (doctor.scheduler("SLURM", Health(good=True, line="is UP")), "ok", "is UP"),
    (doctor.scheduler("SLURM", Health(good=False, line="is DOWN", advice="ask")), "warn", "is DOWN"),
    (doctor.mpi(None, None), "ok", "not installed"),
    (
        doctor.mpi(ProgramOutput(good=True, line="mpirun (Open MPI) 5.0"), None),
        "ok",
        "5.0, mpi4py not installed",
    ),
    (doctor.mpi(ProgramOutput(good=False, line="error while loading"), "4.0"), "warn", "error while loading"),
]


@pytest.mark.parametrize(
    ("check", "verdict", "said"), VERDICTS, ids=lambda value: getattr(value, "name", None)
)
def test_verdicts(check: CheckResult, verdict: str, said: str) -> None:
    assert (check.verdict, said in check.detail) == (verdict, True), check
    assert bool(check.advice) == (verdict != "ok")  # every verdict that is not ok has advice


def test_the_device_that_training_would_choose_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "count_gpu_files", lambda: 0)
    for kind, words in (("mps", "the GPU of this Mac"), ("cpu", "the CPU")):
        monkeypatch.setattr("headway.dist.device.automatic_kind", lambda _, kind=kind: kind)
        assert words in next(iter(doctor.machine(BARE, None))).detail


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        (524288, "ulimit -n 4096"),
        (NO_LIMIT, "ulimit -n 4096"),
        (256, "ask the site to raise the hard limit of 256 (nofile) to 4096"),
    ],
)
def test_a_limit_is_raised_by_whom_it_lets(hard: int, remedy: str) -> None:
    assert doctor.open_files(256, hard).advice.endswith(f"need more: {remedy}")


def test_the_remedy_for_packages_can_be_pasted() -> None:
    check = doctor.packages({"torch": "2.11", "rich": "0.9"}, {"torch": "2.9.1"})
    assert check.advice == "pip install 'rich>=0.9' 'torch>=2.11'"


def test_an_uninstalled_headway_is_said_and_does_not_stop_the_doctor() -> None:
    assert doctor.packages({}, {}).verdict == "warn"


@pytest.mark.parametrize(
    ("verdicts", "worst"), [(["ok"], "ok"), (["ok", "warn"], "warn"), (["bad", "warn", "ok"], "bad")]
)
def test_the_worst_check_decides(verdicts: list[str], worst: str) -> None:
    checks = [CheckResult(name="x", verdict=verdict, detail="") for verdict in verdicts]  # type: ignore[arg-type]
    assert MachineReport(host="box", checks=checks, topology=None).verdict == worst


# ---- facts about this machine


def test_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {f"{name}>={version}" for name, version in probes.required_versions().items()} == set(
        project["dependencies"]
    )
    assert probes.installed_versions(probes.required_versions()).keys() == probes.required_versions().keys()
    assert probes.installed_versions(["no-such-package"]) == {}


def test_torchs_cuda_is_read_without_torch() -> None:
    assert probes.torch_cuda() == torch.version.cuda


@pytest.mark.parametrize(
    ("variable", "visible"),
    [(None, 8), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5,6,7,8,9", 8), ("GPU-ab", 1)],
)
def test_visible_gpus(variable: str | None, visible: int) -> None:
    assert probes.visible_gpus(8, {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}) == visible


def test_programs_answer_fail_hang_or_are_missing() -> None:
    assert probes.run_program("no-such-program") is None
    assert probes.run_program("sh", "-c", "echo one; echo two") == ProgramOutput(good=True, line="one")
    heading = "printf 'HYDRA build details:\\n  Version:   4.3\\n  CC: gcc\\n'"
    assert probes.run_program("sh", "-c", heading) == ProgramOutput(
        good=True, line="HYDRA build details: Version: 4.3"
    )
    assert probes.run_program("sh", "-c", "echo trouble >&2; exit 3") == ProgramOutput(
        good=False, line="trouble"
    )
    odd = probes.run_program("sh", "-c", "printf 'caf\\351'")
    assert odd == ProgramOutput(good=True, line="caf\ufffd"), "a program need not print UTF-8"
    assert probes.run_program("false") == ProgramOutput(good=False, line="exit code 1")
    hung = probes.run_program("sleep", "60", timeout_s=0.2)
    assert hung == ProgramOutput(good=False, line="no output within 0 s")


def test_the_run_root_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    checks = doctor.run_root(tmp_path / "new" / "runs")
    assert [check.name for check in checks] == ["run root", "fsync", "clock"]
    assert f"{tmp_path}/new/runs on " in checks[0].detail
    assert list(tmp_path.iterdir()) == []


def test_a_run_root_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [inside_a_file] = doctor.run_root(tmp_path / "file" / "runs")
    assert (inside_a_file.verdict, "Not a directory" in inside_a_file.detail) == ("bad", True)
    [read_only] = doctor.run_root(Path("/proc/runs"))
    assert read_only.verdict == "bad"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_run_root_behind_a_closed_door_is_bad() -> None:
    with tempfile.TemporaryDirectory() as closed:  # root's alone
        os.seteuid(65534)
        try:
            [check] = doctor.run_root(Path(closed, "runs"))
        finally:
            os.seteuid(os.getuid())
    assert (check.verdict, check.detail) == ("bad", f"{closed}/runs cannot be written: Permission denied")


def test_free_memory_is_that_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "memory_limits", lambda: [MemoryLimit(64 * GIB, 32 * GIB), MemoryLimit(16 * GIB, GIB)]
    )
    memory, *_ = doctor.system()
    assert (memory.name, memory.verdict) == ("memory", "warn") and memory.detail.startswith("1.0 of ")


def test_a_machine_without_dev_shm_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/dev/shm" in {check.name for check in doctor.system()}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "/dev/shm" not in {check.name for check in doctor.system()}


# ---- the canary: real ranks


def test_two_ranks_of_this_machine_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    check = doctor.interconnect(gpus=1)
    assert check.verdict == "ok", check
    assert re.fullmatch(r"2 ranks on cpu: all bytes correct, slowest link \d+\.\d GB/s", check.detail)


def test_a_canary_that_dies_is_bad_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    monkeypatch.setenv("HEADWAY_FAILPOINT", "interconnect.round:rank=1:kill9")
    check = doctor.interconnect(gpus=0)
    assert check.verdict == "bad"
    assert check.detail.startswith("2 ranks on cpu failed: exit code ")
    assert "headway run --nproc 2 -m headway.doctor.canary" in check.advice


def wrong_or_slow(verdict: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "problems": ["rank 0 -> rank 1: trouble"],
        "links": [{"gigabytes_per_second": 0.5}],
    }


@pytest.mark.parametrize(
    ("found", "gpus", "verdict"),
    [("wrong", 0, "bad"), ("wrong", 4, "bad"), ("slow", 4, "warn"), ("slow", 0, "ok")],
)
def test_verdicts_of_the_canary(monkeypatch: pytest.MonkeyPatch, found: str, gpus: int, verdict: str) -> None:
    """Links that are wrong, and GPUs, cannot be had here; `check_interconnect` itself is tested with real ranks."""
    asked: list[tuple[int, str]] = []

    def run_canary(nproc: int, device: str) -> dict[str, object]:
        asked.append((nproc, device))
        return wrong_or_slow(found)

    monkeypatch.setattr(probes, "run_canary", run_canary)
    check = doctor.interconnect(gpus)
    assert check.verdict == verdict
    assert ("rank 0 -> rank 1: trouble" in check.detail) == (verdict != "ok")
    assert asked == [(gpus, "cuda") if gpus else (2, "cpu")]


# ---- the command


def test_plain_lines_elsewhere_than_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["doctor", "--no-canary", "--root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok|warn) {2,4}\S", line) for line in lines)
    assert {"python", "packages", "GPUs", "memory", "run", "SLURM", "MPI"} <= {
        line.split()[1] for line in lines
    }
    assert "interconnect" not in "".join(lines)


def test_bad_means_exit_code_1_and_json_has_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["doctor", "--no-canary", "--json", "--root", "/proc/runs"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "bad"
    assert [check["name"] for check in facts["checks"] if check["verdict"] == "bad"] == ["run root"]
    assert facts["topology"]["host"] == facts["host"]


def test_the_table_shows_every_check_and_remedy() -> None:
    checks = [check for check, _, _ in VERDICTS]
    screen = Console(file=io.StringIO(), width=400, force_terminal=True)
    screen.print(command.table("headway doctor on box", checks))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert all(check.detail in shown and check.advice in shown for check in checks)


def test_torch_is_imported_only_when_the_examination_begins() -> None:
    machine = "headway.dist.topology.machine"
    code = f"import sys, headway.cli.doctor; print('torch' in sys.modules, {machine!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_broken_torch_is_one_bad_line_among_the_others(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "headway", "doctor", "--root", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "bad   torch         cannot be imported: libcudart.so.13" in done.stdout
    assert "/dev/shm" in done.stdout
    assert done.stderr == ""


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["doctor", "--frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err
