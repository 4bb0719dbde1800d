"""The doctor of several nodes: verdicts from facts, a slow link and a wrong clock named, the examination itself."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml as nv
import pytest
import torch.distributed as td
from torch import Tensor

from headway import dist
from headway.cli import main as headway
from headway.dist.topology import nvml
from headway.dist.topology.clocks import ClockOffset, measure_clocks
from headway.dist.topology.interconnect import Interconnect, Link, ProcessGroupTransport, check_interconnect
from headway.doctor import checks, cluster, examination, job, probes, storage
from headway.doctor.checks import CheckResult, bad, ok, warn
from headway.doctor.cluster import NodeReport
from headway.launcher.targets import Slurm
from headway.record import diagnostics
from headway.testing import ranks

GIB = 2**30


def links_of(hosts: list[str], slow: dict[tuple[int, int], float], wrong: int = 0) -> Interconnect:
    pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b]
    links = [
        Link(
            sender=a,
            receiver=b,
            gigabytes_per_second=slow.get((a, b), 40.0),
            microseconds=5.0,
            bytes=2**24,
            wrong=wrong,
        )
        for a, b in pairs
    ]
    return Interconnect(
        hosts=hosts,
        device="cuda",
        bytes=2**24,
        all_reduce=90.0,
        all_reduce_wrong=[0] * len(hosts),
        links=links,
    )


HOSTS = ["n1", "n2", "n3", "n4"]
AGREES = ClockOffset(rank=1, offset_s=0.002, error_s=0.001)
BEHIND = ClockOffset(rank=2, offset_s=-30.0, error_s=0.2)
SAME = {"headway": "1.0", "torch": "2.13", "python": "3.11.7", "driver": "570.1"}
HEALTHY: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-a",
    "utilization": 1.0,
    "temperature": 60,
    "clock": 1900,
    "clock_max": 1980,
    "throttling": ["power cap"],
    "ecc_since_reset": 0,
    "ecc_errors": 3,
    "remap_pending": False,
    "remap_failed": False,
}

VERDICTS = [
    (cluster.versions({"n1": SAME, "n2": SAME}), "ok", "headway 1.0, torch 2.13"),
    (cluster.versions({"n1": SAME, "n2": SAME | {"torch": "2.12"}, "n3": SAME}), "bad", "torch 2.12 on n2, 2.13 on n1"),
    (cluster.versions({"n1": SAME, "n2": SAME | {"headway": "0.9"}}), "bad", "headway"),
    (cluster.versions({"n1": SAME | {"NCCL": "2.28"}, "n2": SAME}), "bad", "NCCL"),
    (cluster.versions({"n1": SAME, "n2": SAME | {"driver": "550.9"}}), "warn", "driver 570.1 on n1, 550.9 on n2"),
    (cluster.versions({"n1": SAME, "n2": SAME | {"python": "3.11.9"}}), "warn", "python"),
    (cluster.storage_rate("run write", {"n1": 900.0, "n2": 1100.0}), "ok", "1,000 MB/s on each of 2 nodes"),
    (cluster.storage_rate("run write", {"n1": 900.0, "n2": 1000.0, "n3": 300.0}), "warn", "but n3 300"),
    (cluster.storage_rate("run write", {"n1": 20.0, "n2": 21.0}), "warn", "20 MB/s"),
    (cluster.storage_rate("data read: /d", {"n1": 20.0, "n2": "No such file"}), "bad", "n2: No such file"),
    (cluster.gpu_speed([700.0, 690.0, 705.0, 698.0], HOSTS), "ok", "699 TFLOP/s on each of 4 GPUs"),
    (cluster.gpu_speed([700.0, 690.0, 420.0, None], HOSTS), "warn", "rank 2 (host n3) 420"),
    (cluster.interconnect(links_of(HOSTS, {})), "ok", "4 ranks on cuda: all bytes correct"),
    (cluster.interconnect(links_of(HOSTS, {(0, 3): 4.0})), "warn", "rank 0 (host n1) -> rank 3 (host n4): 4.00 GB/s"),
    (cluster.interconnect(links_of(HOSTS, {}, wrong=9)), "bad", "9 of 16777216 bytes wrong; and 8 more"),
    (cluster.interconnect(links_of(["n1"], {})), "ok", "one rank"),
    (cluster.clock_skew([], ["n1"]), "ok", "one node"),
    (cluster.clock_skew([AGREES], HOSTS), "ok", "2 nodes agree within 3 ms"),
    (cluster.clock_skew([BEHIND], HOSTS), "warn", "compared with n1: n3 29.8 s behind"),
    (cluster.clock_skew([replace(BEHIND, error_s=29.5)], HOSTS), "ok", "agree"),  # a slow trip proves nothing
    (checks.gpu_health([HEALTHY]), "ok", "at most 60 C"),
    (checks.gpu_health([HEALTHY | {"ecc_since_reset": 2}]), "bad", "GPU 0 had 2 uncorrectable"),
    (checks.gpu_health([HEALTHY | {"remap_failed": True}]), "bad", "no spare memory rows"),
    (checks.gpu_health([HEALTHY | {"remap_pending": True}]), "warn", "next reset"),
    (checks.gpu_health([{"index": 3, "error": "GPU is lost"}]), "bad", "GPU 3 does not respond: GPU is lost"),
    (checks.gpu_health([HEALTHY | {"throttling": ["heat"], "temperature": 91}]), "warn", "by heat at 91 C"),
    (checks.gpu_health([HEALTHY | {"clock": 345}]), "warn", "busy at 345 of 1980 MHz"),
    (checks.gpu_health([HEALTHY | {"clock": 345, "utilization": 0.0}]), "ok", "no throttling"),  # it is idle
    (checks.gpu_health([{"index": 0, "uuid": "GPU-a"}]), "ok", ""),  # a GPU that reports nothing
    (checks.limits({}), "ok", "not limited"),
    (checks.limits({"file size": GIB}), "bad", "files of at most 1.0 GiB"),
    (checks.limits({"address space": 64 * GIB}), "bad", "64.0 GiB of address space"),
    (checks.limits({"processes": 512}), "warn", "at most 512 processes"),
    (checks.limits({"processes": 10**6, "file size": 2**62}), "ok", "not limited"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "verdict", "said"), VERDICTS, ids=lambda value: getattr(value, "name", None)
)
def test_verdicts(check: CheckResult, verdict: str, said: str) -> None:
    assert (check.verdict, said in check.detail) == (verdict, True), check
    assert bool(check.advice) == (verdict != "ok")


def test_one_line_for_all_nodes_names_those_that_are_not_ok() -> None:
    same = ok("memory", "64 GiB")
    assert cluster.combine({"n1": same, "n2": same}) == same
    assert cluster.combine({"n1": same, "n2": ok("memory", "65 GiB")}).detail == (
        "64 GiB (on n1; ok on all 2 nodes)"
    )
    small = warn("/dev/shm", "64 MiB", "raise it")
    assert cluster.combine({"n1": ok("/dev/shm", "8 GiB"), "n2": small, "n3": small}).detail == (
        "n2: 64 MiB; n3: 64 MiB"
    )
    missing = bad("/dev/shm", "does not exist", "make it")
    worst = cluster.combine({"n1": small, "n2": missing})
    assert (worst.verdict, worst.detail, worst.advice) == ("bad", "n2: does not exist", "make it")
    assert cluster.combine({"n1": small, "n2": small}).detail == "64 MiB"
    many = {f"n{number}": replace(small, detail=str(number)) for number in range(9)}
    assert cluster.combine(many).detail == "n0: 0; n1: 1; n2: 2; n3: 3; and on 5 more nodes"


def test_the_worst_line_decides_and_json_has_all_facts() -> None:
    nodes = [
        NodeReport(host=host, versions=SAME, checks=[ok("CPUs", "64")], rates={"run write": 900.0}, gpus=[])
        for host in HOSTS
    ]
    report = cluster.judge(nodes, speeds=[None] * 4, links=links_of(HOSTS, {}), clocks=[], rank_hosts=HOSTS)
    assert report.verdict == "ok"
    assert [check.name for check in report.checks] == [
        "versions",
        "CPUs",
        "run write",
        "interconnect",
        "clocks",
    ]
    nodes[1] = replace(
        nodes[1], checks=[warn("CPUs", "2", "more")], rates={"run write": "Read-only file system"}
    )
    report = cluster.judge(
        nodes, speeds=[600.0] * 4, links=links_of(HOSTS, {}), clocks=[BEHIND], rank_hosts=HOSTS
    )
    facts = json.loads(json.dumps(report.to_dict()))
    assert facts["verdict"] == "bad"
    assert {check["name"]: check["verdict"] for check in facts["checks"]} == {
        "versions": "ok",
        "CPUs": "warn",
        "run write": "bad",
        "GPU speed": "ok",
        "interconnect": "ok",
        "clocks": "warn",
    }
    assert NodeReport.from_dict(facts["nodes"][1]) == nodes[1]


# ---- NVML, answering as a GPU with faults would


def test_memory_errors_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: NVML's functions are replaced, the readers are the real ones."""

    def total_errors(_: object, kind: int, counter: int) -> int:
        assert kind == nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return {nv.NVML_VOLATILE_ECC: 2, nv.NVML_AGGREGATE_ECC: 7}[counter]

    def refuse(*_: object) -> None:
        raise nv.NVMLError_NotSupported

    for name in [name for name in dir(nv) if name.startswith("nvmlDeviceGet")]:
        monkeypatch.setattr(nv, name, refuse)
    monkeypatch.setattr(nv, "nvmlInit", lambda: None)
    monkeypatch.setattr(nv, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(nv, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(nv, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(nv, "nvmlDeviceGetUUID", lambda _: "GPU-a")
    assert probes.sample_gpus() == [{"index": 0, "uuid": "GPU-a"}]
    monkeypatch.setattr(nv, "nvmlDeviceGetTotalEccErrors", total_errors)
    monkeypatch.setattr(nv, "nvmlDeviceGetRemappedRows", lambda _: (0, 1, 1, 0))
    monkeypatch.setattr(
        nv,
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        lambda _: nv.nvmlClocksThrottleReasonHwThermalSlowdown,
    )
    [sample] = probes.sample_gpus()
    assert sample == {
        "index": 0,
        "uuid": "GPU-a",
        "throttling": ["heat (hardware)"],
        "ecc_errors": 7,
        "ecc_since_reset": 2,
        "remap_pending": True,
        "remap_failed": False,
    }
    found = checks.gpu_health([sample])
    assert found.verdict == "bad"
    assert "2 uncorrectable" in found.detail and "heat (hardware)" in found.detail


def test_a_gpu_that_is_lost_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: NVML's functions are replaced, the readers are the real ones."""

    def handle(index: int) -> int:
        if index != 2:
            raise (nv.NVMLError_Unknown if index else nv.NVMLError_NoPermission)
        return index

    def refuse(*_: object) -> None:
        raise nv.NVMLError_Unknown  # not only what is not supported

    for name in [name for name in dir(nv) if name.startswith("nvmlDeviceGet")]:
        monkeypatch.setattr(nv, name, refuse)
    monkeypatch.setattr(nv, "nvmlInit", lambda: None)
    monkeypatch.setattr(nv, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(nv, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(nv, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(nv, "nvmlDeviceGetUUID", lambda _: "GPU-c")
    monkeypatch.setattr(nv, "nvmlDeviceGetName", lambda _: "H200")
    monkeypatch.setattr(nv, "nvmlDeviceGetPciInfo", lambda _: SimpleNamespace(busId="00000000:1B:00.0"))
    assert [(gpu.name, gpu.uuid, gpu.nvlinks) for gpu in nvml.read_gpus()] == [("H200", "GPU-c", {})]
    lost, other = probes.sample_gpus()
    assert lost == {"index": 0, "error": "Unknown Error"} and other == {"index": 1, "uuid": "GPU-c"}
    found = checks.gpu_health([lost, other])
    assert (found.verdict, found.detail) == ("bad", "GPU 0 does not respond: Unknown Error")


def test_a_driver_that_does_not_respond_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that has lost its devices, for which NVML knows no better word, can train on the CPU."""

    def fail() -> None:
        raise nv.NVMLError_Unknown

    monkeypatch.setattr(nv, "nvmlInit", fail)
    assert nvml.read_gpus() == probes.sample_gpus() == diagnostics.collect()["gpus"] == []
    assert nvml.read_driver() is None


def test_gpus_of_other_jobs_on_a_node_are_not_judged() -> None:
    seen = [{"uuid": "GPU-a1"}, {"uuid": "GPU-b2"}, {"index": 2, "error": "GPU is lost"}]
    assert [examination.is_used(gpu, {"b2"}) for gpu in seen] == [False, True, True]
    assert all(examination.is_used(gpu, set()) for gpu in seen), "no rank uses a GPU"


# ---- storage


def test_rates_of_storage_are_of_bytes_that_were_moved(tmp_path: Path) -> None:
    written = storage.time_write(tmp_path / "a.bin", 5 << 20)
    assert written.bytes == (tmp_path / "a.bin").stat().st_size >= 5 << 20
    assert oct((tmp_path / "a.bin").stat().st_mode)[-3:] == "600"
    assert storage.time_read(tmp_path / "a.bin", 3 << 20).bytes == 3 << 20
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.bin").write_bytes(b"x" * 1000)
    assert storage.time_read(tmp_path, 1 << 30).bytes == written.bytes + 1000
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    assert storage.time_read(tmp_path, 1 << 30).bytes == written.bytes + 1000
    assert written.megabytes_per_second == pytest.approx(written.bytes / written.seconds / 1e6)


# ---- real ranks


@dataclass
class SlowWire:
    """The process group, but one direction takes half a second longer."""

    link: tuple[int, int]

    def __post_init__(self) -> None:
        self.group = ProcessGroupTransport()
        self.device, self.receive, self.all_reduce = (
            self.group.device,
            self.group.receive,
            self.group.all_reduce,
        )

    def send(self, tensor: Tensor, to: int) -> None:
        if (td.get_rank(), to) == self.link and tensor.numel() > 1:
            time.sleep(0.5)
        self.group.send(tensor, to)


@ranks(3)
def test_a_slow_link_and_a_wrong_clock_are_named() -> None:
    hosts = ["n1", "n2", "n3"]
    links = replace(check_interconnect(megabytes=1, transport=SlowWire((1, 2))), hosts=hosts)
    clocks = measure_clocks([1, 2], clock=lambda: time.time() + (3600.0 if td.get_rank() == 2 else 0.0))
    if td.get_rank():
        assert clocks == []
        return
    found = cluster.interconnect(links)
    assert (
        found.verdict == "warn" and "rank 1 (host n2) -> rank 2 (host n3): 0.00 GB/s, where" in found.detail
    )
    assert [each.rank for each in clocks] == [1, 2]
    assert abs(clocks[0].offset_s) <= clocks[0].error_s + 0.01
    assert abs(clocks[1].offset_s - 3600.0) <= clocks[1].error_s + 0.01
    assert cluster.clock_skew(clocks, hosts).detail.startswith("compared with n1: n3 3")


@ranks(2)
def test_ranks_examine_their_node_and_leave_one_file(tmp_path: Path) -> None:
    result = tmp_path / "doctor.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        verdict = examination._examine(dist.world(), result, [tmp_path / "nowhere"], file_bytes=1 << 20)
    assert verdict == "bad"  # on both ranks: there is no such data
    if td.get_rank():
        return
    facts = json.loads(result.read_bytes())
    lines = {check["name"]: check for check in facts["checks"]}
    assert {
        "versions",
        "packages",
        "memory",
        "/dev/shm",
        "limits",
        "run root",
        "run write",
        "run read",
    } <= set(lines)
    of_a_machine = {check.name for check in checks.examine(root=tmp_path, canary=False).checks}
    assert of_a_machine - {check.name for check in checks.launchers()} <= set(lines)
    assert "No such file" in lines["data read"]["detail"]
    assert [check["name"] for check in facts["checks"] if check["verdict"] == "bad"] == ["data read"]
    [node] = facts["nodes"]  # both ranks are on this one
    assert node["versions"]["torch"] and node["rates"]["run read"] > 0
    assert len(facts["interconnect"]["links"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    assert "bad   data read     " in printed.getvalue()


# ---- the command


def test_the_job_of_an_examination_has_nothing_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description of a cluster may be one that runs are submitted with."""
    cluster_file = Slurm(
        nodes=2,
        time="10:00",
        array=("lr=1,2",),
        array_limit=1,
        pre=("/data",),
        pre_to="/scratch",
        doctor=True,
        alert=("failed",),
        max_requeues=7,
        max_restarts=3,
    )
    submitted: list[object] = []
    monkeypatch.setattr(job, "check_target", lambda _: None)
    monkeypatch.setattr(job, "submit_runs", lambda _runs, _programs, target: submitted.append(target))
    job.submit(cluster_file, root=tmp_path / "runs")
    assert submitted == [Slurm(nodes=2, time="10:00", requeue=False)]


def test_options_of_a_job_need_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["doctor", "--gpus-per-node", "8"]) == 2
    assert (
        "--gpus-per-node is for nodes of a cluster: give their number with --nodes" in capsys.readouterr().err
    )
    assert headway(["doctor", "--nodes", "2", "--no-canary"]) == 2
    assert headway(["doctor", "--nodes", "2", "--requeue"]) == 2
