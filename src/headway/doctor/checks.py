"""Checks whether this machine is fit to train. Each check has a verdict and, unless that is ok, advice.

A check is a function from facts to a `CheckResult`; `examine_node` and `examine` collect the facts, most of them with
`headway.doctor.probes`. All of this also works where torch cannot be imported.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from headway import schedulers
from headway.doctor import probes
from headway.doctor.probes import ProgramOutput
from headway.schedulers.base import Health
from headway.system.limits import filesystem_type, memory_limits, resource_limits, usable_cpus

if TYPE_CHECKING:
    from headway.dist.topology.machine import Topology
    from headway.dist.topology.nvml import Driver

CheckVerdict = Literal["ok", "warn", "bad"]
SEVERITY: Mapping[CheckVerdict, int] = {"ok": 0, "warn": 1, "bad": 2}

_GIB = 2**30
_OPEN_FILES_MIN = 4096
"""for data workers and sockets"""
_PROCESSES_MIN = 4096
"""for ranks, data workers and their threads"""
_LIMITS = {
    "file size": resource.RLIMIT_FSIZE,
    "address space": resource.RLIMIT_AS,
    "processes": resource.RLIMIT_NPROC,
}
_OTHER_DEVICES = {
    "cpu": "the CPU",
    "mps": "the GPU of this Mac (mps), in one process",
    "cuda": "the GPUs that torch finds (AMD: ROCm)",
}
"""what training uses without an NVIDIA GPU, by the kind of device"""
_USUAL_THROTTLING = ("power cap",)
"""a large matrix product reaches the power cap of every healthy GPU"""
_BUSY, _LOW_CLOCK = 0.9, 0.5
"""a GPU that is busy should not run at less than half of its highest clock"""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report. `warn`: may cost speed or safety; `bad`: runs will fail; `advice`: what to do."""

    name: str
    verdict: CheckVerdict
    detail: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """The results of all checks; `topology` is None if torch cannot be imported."""

    host: str
    checks: Sequence[CheckResult]
    topology: Topology | None

    @property
    def verdict(self) -> CheckVerdict:
        """The worst verdict of all checks."""
        return worst(check.verdict for check in self.checks)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return {"verdict": self.verdict, **asdict(self)}


def examine(*, root: Path, canary: bool = True) -> MachineReport:
    """Runs all checks. `root` is where runs will be written; `canary` starts ranks that test their links."""
    checks, topology = examine_node(root)
    checks += launchers()
    if canary and topology is not None:
        checks.append(interconnect(probes.visible_gpus(len(topology.gpus), os.environ)))
    return MachineReport(host=os.uname().nodename, checks=checks, topology=topology)


def examine_node(
    root: Path, samples: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[CheckResult], Topology | None]:
    """Runs the checks that `headway doctor` and each node of a job have in common; `samples` are of GPUs under load.

    Also returns the topology, None if torch cannot be imported.
    """
    required = probes.required_versions()
    checks = [python(), packages(required, probes.installed_versions(required))]
    topology: Topology | None = None
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing or broken
        checks.append(bad("torch", f"cannot be imported: {error}", "pip install --force-reinstall torch"))
    else:
        from headway.dist.topology.machine import detect
        from headway.dist.topology.nvml import read_driver

        topology = detect()
        checks += machine(topology, read_driver(), samples)
    return [*checks, *system(), *run_root(root)], topology


def worst(verdicts: Iterable[CheckVerdict]) -> CheckVerdict:
    """Returns the worst verdict; "ok" if there are none.

    >>> worst(["ok", "bad", "warn"])
    'bad'
    """
    return max(verdicts, key=SEVERITY.__getitem__, default="ok")


def line(check: CheckResult) -> str:
    """Returns a check as one line of plain text.

    >>> line(ok("CPUs", "64"))
    'ok    CPUs          64'
    """
    advice = f"  -> {check.advice}" if check.advice else ""
    return f"{check.verdict:<4}  {check.name:<12}  {check.detail}{advice}"


def ok(name: str, detail: str) -> CheckResult:
    """Returns a result that needs no advice."""
    return CheckResult(name=name, verdict="ok", detail=detail)


def warn(name: str, detail: str, advice: str) -> CheckResult:
    """Returns a result that may cost speed or safety."""
    return CheckResult(name=name, verdict="warn", detail=detail, advice=advice)


def bad(name: str, detail: str, advice: str) -> CheckResult:
    """Returns a result that makes runs fail."""
    return CheckResult(name=name, verdict="bad", detail=detail, advice=advice)


# ---- software


def python() -> CheckResult:
    """Names the version of Python; an older one than headway needs cannot import headway."""
    return ok("python", f"{platform.python_version()} at {sys.executable}")


def packages(required: Mapping[str, str], installed: Mapping[str, str]) -> CheckResult:
    """Checks the versions of packages; `required` has the oldest supported ones."""
    if not required:
        return warn(
            "packages",
            "headway is not installed as a package, so its dependencies are not known",
            "pip install -e .",
        )
    missing = [name for name in required if name not in installed]
    old = [
        name
        for name in installed
        if probes.version_numbers(installed[name]) < probes.version_numbers(required[name])
    ]
    if missing or old:
        wrong = [f"{name} is missing" for name in missing] + [
            f"{name} {installed[name]} is too old" for name in old
        ]
        wanted = " ".join(f"'{name}>={required[name]}'" for name in [*missing, *old])
        return bad("packages", ", ".join(wrong), f"pip install {wanted}")
    return ok("packages", ", ".join(f"{name} {version}" for name, version in installed.items()))


# ---- GPUs, links, network


def machine(
    topology: Topology, driver: Driver | None, samples: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[CheckResult]:
    """Checks GPUs, links, network and CPUs; `samples` are of GPUs under load, if there are any."""
    from headway.dist.device import automatic_kind

    yield gpus(
        topology,
        driver,
        torch_cuda=probes.torch_cuda(),
        device_files=probes.count_gpu_files(),
        device="cuda" if topology.gpus else automatic_kind(1),
    )
    found = probes.sample_gpus() if samples is None else samples
    if topology.gpus or any("error" in gpu for gpu in found):
        yield gpu_health(found)
    if len(topology.gpus) > 1:
        yield gpu_links(topology)
    if topology.ports:
        yield infiniband(topology, locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield host_name(topology, cluster=schedulers.detect() is not None)
    yield cpus(usable_cpus(), os.cpu_count() or 1, gpus=len(topology.gpus))


def gpus(
    topology: Topology,
    driver: Driver | None,
    *,
    torch_cuda: str | None,
    device_files: int,
    device: str = "cpu",
) -> CheckResult:
    """Checks GPUs. `torch_cuda`: the CUDA version that torch was built with; `device_files`: NVIDIA GPUs in /dev.

    `device` is the kind of device that one process would choose.
    """
    if driver is None and device_files:
        detail = f"/dev has {device_files}, but the driver does not respond"
        return bad(
            "GPUs", detail, "run nvidia-smi; after a driver update, restart the machine or the container"
        )
    if driver is None or not topology.gpus:
        if device_files:  # a job sees the device files of all GPUs of the node, but may use only its own
            detail = f"/dev has {device_files}, but this process may use none of them: it trains on the CPU"
            return warn(
                "GPUs", detail, "to use them, request GPUs: --gpus-per-node, or docker run --gpus all"
            )
        return ok("GPUs", f"no NVIDIA GPU; training uses {_OTHER_DEVICES[device]}")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in topology.gpus))
    memory = min(gpu.memory for gpu in topology.gpus) / _GIB
    own = f", {memory:.0f} GiB" if memory else ""
    detail = f"{len(topology.gpus)} x {names}{own}, driver {driver.version}"
    if torch_cuda is None:
        return bad(
            "GPUs", f"{detail}; torch was built without CUDA", "install torch with CUDA: see pytorch.org"
        )
    if driver.cuda[0] < probes.version_numbers(torch_cuda)[0]:
        newest = ".".join(map(str, driver.cuda))
        detail = f"{detail} supports CUDA up to {newest}, but torch was built with {torch_cuda}"
        return bad("GPUs", detail, f"update the driver, or install torch for CUDA {driver.cuda[0]}")
    return ok("GPUs", f"{detail}, torch with CUDA {torch_cuda}")


def gpu_health(samples: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Checks memory errors, throttling and clocks of GPUs; `samples` are from `probes.sample_gpus`."""
    broken, weak = [], []
    for gpu in samples:
        name = f"GPU {gpu['index']}"
        if "error" in gpu:
            broken.append(f"{name} does not respond: {gpu['error']}")
        if gpu.get("ecc_since_reset"):
            broken.append(
                f"{name} had {gpu['ecc_since_reset']} uncorrectable memory errors since its last reset"
            )
        if gpu.get("remap_failed"):
            broken.append(f"{name} has no spare memory rows left")
        if gpu.get("remap_pending"):
            weak.append(f"{name} replaces faulty memory rows at its next reset")
        if reasons := [reason for reason in gpu.get("throttling", ()) if reason not in _USUAL_THROTTLING]:
            weak.append(f"{name} is throttled by {' and '.join(reasons)} at {gpu.get('temperature', '?')} C")
        elif gpu.get("utilization", 0) > _BUSY and _clock_share(gpu) < _LOW_CLOCK:
            weak.append(f"{name} is busy at {gpu['clock']} of {gpu['clock_max']} MHz")
    if broken:
        advice = "results may be wrong: leave the node out, and ask the site to reset or replace the GPU"
        return bad("GPU health", "; ".join([*broken, *weak]), advice)
    if weak:
        return warn("GPU health", "; ".join(weak), "steps will be slow: report these lines to the site")
    hottest = max((gpu.get("temperature", 0) for gpu in samples), default=0)
    return ok("GPU health", f"no memory errors, no throttling, at most {hottest} C")


def _clock_share(gpu: Mapping[str, Any]) -> float:
    return float(gpu.get("clock", 1) / (gpu.get("clock_max") or 1))


def gpu_links(topology: Topology) -> CheckResult:
    """Checks that all pairs of GPUs have the same number of NVLinks."""
    from headway.dist.topology.machine import describe_gpus

    switched = [link for link in topology.links if link.via == "switch"]
    most = max((link.count for link in switched), default=0)
    weak = [f"{link.a}-{link.b} ({link.count} of {most})" for link in switched if link.count < most]
    if weak:
        detail = f"some pairs have fewer NVLinks: {', '.join(weak[:4])}"
        return warn("GPU links", detail, "run nvidia-smi nvlink --status, and report it to the site")
    return ok("GPU links", describe_gpus(topology))


def infiniband(topology: Topology, *, locked_memory: int) -> CheckResult:
    """Checks InfiniBand ports, and the limit on locked memory that RDMA needs."""
    from headway.dist.topology.machine import describe_ports

    detail = describe_ports(topology)
    down = [str(port) for port in topology.ports if not port.active]
    if down:
        detail = f"{detail}; down: {', '.join(down)}"
    if locked_memory != resource.RLIM_INFINITY and len(down) < len(topology.ports):
        detail = f"{detail}; locked memory is limited to {locked_memory / 2**20:.0f} MiB"
        return warn("InfiniBand", detail, "RDMA may fail: ulimit -l unlimited")
    return (
        warn("InfiniBand", detail, "run ibstat; unused ports are harmless")
        if down
        else ok("InfiniBand", detail)
    )


def host_name(topology: Topology, *, cluster: bool) -> CheckResult:
    """Checks that the host name resolves to an address that other nodes can reach."""
    if topology.address is None:
        detail = f"{topology.host} does not resolve; ranks will use the loopback"
        return warn("host name", detail, f"add '127.0.1.1 {topology.host}' to /etc/hosts")
    if cluster and ip_address(topology.address).is_loopback:
        detail = f"{topology.host} resolves to {topology.address}, which other nodes cannot reach"
        return warn("host name", detail, "set GLOO_SOCKET_IFNAME if headway chooses the wrong interface")
    return ok("host name", f"{topology.host} resolves to {topology.address}")


# ---- the system


def system() -> Iterator[CheckResult]:
    """Checks memory and limits."""
    memory = psutil.virtual_memory()
    free = min((each.free for each in memory_limits()), default=memory.available)
    yield host_memory(memory.total, min(free, memory.available), limit=resource_limits().memory)
    if sys.platform == "linux":  # macOS has shared memory without a directory
        yield shared_memory(probes.filesystem_bytes(Path("/dev/shm")))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    soft = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    yield limits({name: value for name, value in soft.items() if value != resource.RLIM_INFINITY})


def cpus(usable: int, total: int, *, gpus: int) -> CheckResult:
    """Checks that there are enough CPUs for data loading."""
    detail = f"{usable} of {total} usable" if usable < total else f"{total}"
    if gpus and usable < 2 * gpus:
        advice = "data loading needs more: request them (--cpus-per-task), or check taskset"
        return warn("CPUs", f"{detail}, for {gpus} GPUs", advice)
    return ok("CPUs", detail)


def host_memory(total: int, available: int, *, limit: int | None) -> CheckResult:
    """Checks the free memory of the machine and its cgroups; `limit` is the tightest limit of a cgroup."""
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if limit is not None and limit < total:
        detail, available = f"{detail}, this process may use {limit / _GIB:.1f}", min(available, limit)
    if available < 2 * _GIB:
        return warn(
            "memory", detail, "a rank needs about 1 GiB before its model: free some, or request more (--mem)"
        )
    return ok("memory", detail)


def shared_memory(size: int | None) -> CheckResult:
    """Checks the size of /dev/shm."""
    advice = "data workers pass batches through it: docker run --shm-size=8g, or --ipc=host"
    if size is None:
        return bad("/dev/shm", "does not exist", advice)
    if size < _GIB:
        return warn("/dev/shm", f"{size / 2**20:.0f} MiB", advice)
    return ok("/dev/shm", f"{size / _GIB:.1f} GiB")


def open_files(soft: int, hard: int) -> CheckResult:
    """Checks the limit on open files."""
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft < _OPEN_FILES_MIN:
        how = f"ulimit -n {_OPEN_FILES_MIN}"
        if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_MIN:
            how = f"ask the site to raise the hard limit of {hard} (nofile) to {_OPEN_FILES_MIN}"
        return warn("open files", f"at most {soft}", f"data workers and sockets need more: {how}")
    return ok("open files", f"at most {soft}")


def limits(found: Mapping[str, int]) -> CheckResult:
    """Checks other limits that stop a run; `found` has those that are set, by their names in `_LIMITS`."""
    wrong = []
    if found.get("file size", _GIB * 1024) < _GIB * 1024:
        wrong.append(f"files of at most {found['file size'] / _GIB:.1f} GiB (ulimit -f unlimited)")
    if "address space" in found:
        wrong.append(f"{found['address space'] / _GIB:.1f} GiB of address space (ulimit -v unlimited)")
    if wrong:
        return bad(
            "limits", "; ".join(wrong), "checkpoints and CUDA need more: raise these in the job's --setup"
        )
    if found.get("processes", _PROCESSES_MIN) < _PROCESSES_MIN:
        advice = f"data workers and threads need more: ulimit -u {_PROCESSES_MIN}"
        return warn("limits", f"at most {found['processes']} processes and threads", advice)
    return ok("limits", "files, address space and processes are not limited below what runs need")


# ---- where runs are written


def run_root(root: Path) -> list[CheckResult]:
    """Checks where runs will be written: permission, free space, time of an fsync, clock."""
    directory = root.absolute()
    try:
        directory = probes.nearest_directory(root)
        written = probes.measure_write(directory)
    except OSError as error:
        detail = f"{directory} cannot be written: {error.strerror}"
        return [bad("run root", detail, "choose another: headway doctor --root PATH")]
    return [
        run_root_disk(root, filesystem_type(directory) or "unknown", free=shutil.disk_usage(directory).free),
        fsync_time(written.fsync_s),
        clock(written.clock_skew_s),
    ]


def run_root_disk(root: Path, kind: str, *, free: int) -> CheckResult:
    """Checks type and free space of the file system for runs."""
    detail = f"{root.absolute()} on {kind}, {free / _GIB:.0f} GiB free"
    if free < _GIB:
        return bad("run root", detail, "checkpoints will not fit: free space, or choose another --root")
    if kind in ("tmpfs", "ramfs", "overlay"):
        return warn(
            "run root", detail, "its content is lost with the machine or container: choose another --root"
        )
    if free < 20 * _GIB:
        return warn("run root", detail, "a few checkpoints of a large model may fill it")
    return ok("run root", detail)


def fsync_time(seconds: float) -> CheckResult:
    """Checks the time of a small write with fsync."""
    detail = f"{seconds * 1000:.1f} ms to write a small file with fsync"
    if seconds > 0.1:
        return warn("fsync", detail, "checkpoints will be slow: a local or parallel file system is faster")
    return ok("fsync", detail)


def clock(skew: float) -> CheckResult:
    """Checks the clock; `skew`: seconds by which the file system's clock is ahead of this machine's."""
    if abs(skew) > 2:
        side = "ahead of" if skew > 0 else "behind"
        detail = f"the file server's clock is {abs(skew):.0f} s {side} this machine's"
        return warn(
            "clock",
            detail,
            "active runs may be listed as lost: ask the site to synchronize clocks (chrony, ntp)",
        )
    return ok("clock", "agrees with the file system's")


# ---- schedulers and launchers


def launchers() -> Iterator[CheckResult]:
    """Checks schedulers and MPI."""
    for each in schedulers.shipped():
        yield scheduler(each.label, each.health(os.environ))
    mpirun = probes.run_program("mpirun", "--version") or probes.run_program("mpiexec", "--version")
    yield mpi(mpirun, probes.installed_versions(["mpi4py"]).get("mpi4py"))


def scheduler(label: str, health: Health | None) -> CheckResult:
    """Checks whether a scheduler can be used from this machine."""
    if health is None:
        return ok(label, "not installed")
    return ok(label, health.line) if health.good else warn(label, health.line, health.advice)


def mpi(version: ProgramOutput | None, mpi4py: str | None) -> CheckResult:
    """Checks MPI; `version` is the output of `mpirun --version`."""
    if version is None:
        return ok("MPI", "not installed")
    if not version.good:
        return warn("MPI", version.line, "to use MPI, load the site's MPI module")
    return ok("MPI", f"{version.line}, mpi4py {mpi4py or 'not installed'}")


def interconnect(gpus: int) -> CheckResult:
    """Tests the links between ranks with known bytes: one rank per GPU, or two on the CPU if there is at most one."""
    nproc, device = (gpus, "cuda") if gpus > 1 else (2, "cpu")
    try:
        facts = probes.run_canary(nproc, device)
    except RuntimeError as error:
        command = f"headway run --nproc {nproc} -m headway.doctor.canary /dev/stdout {device}"
        return bad(
            "interconnect", f"{nproc} ranks on {device} failed: {error}", f"to reproduce it, run: {command}"
        )
    problems = "; ".join(facts["problems"])
    if facts["verdict"] == "wrong":
        return bad("interconnect", problems, "do not train on this machine: report these lines to the site")
    if facts["verdict"] == "slow" and device == "cuda":  # on busy CPUs every link is slow
        return warn("interconnect", problems, "if the machine is idle, report these lines to the site")
    speed = min(link["gigabytes_per_second"] for link in facts["links"])
    return ok("interconnect", f"{nproc} ranks on {device}: all bytes correct, slowest link {speed:.1f} GB/s")
