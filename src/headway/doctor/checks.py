"""Is this machine fit to train? Small checks, each with a verdict and, where something is amiss, the remedy.

A check is a function from facts to a `Check`; `examine` gathers the facts of this machine, by `headway.doctor.probes`
where that takes more than a line. A machine on which torch cannot be imported is examined as well.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from headway import schedulers
from headway.doctor import probes
from headway.doctor.probes import Answer
from headway.schedulers.base import Health
from headway.system.limits import filesystem_type, resource_limits, usable_cpus

if TYPE_CHECKING:
    from headway.dist.topology.machine import Topology
    from headway.dist.topology.nvml import Driver

Verdict = Literal["ok", "warn", "bad"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report: `warn` may cost speed or safety, `bad` stops runs; `advice` says what to do."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found; `topology` is None where torch cannot be imported."""

    host: str
    checks: Sequence[Check]
    topology: Topology | None

    @property
    def verdict(self) -> Verdict:
        """The worst of all checks."""
        found = {check.verdict for check in self.checks}
        return "bad" if "bad" in found else "warn" if "warn" in found else "ok"

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"verdict": self.verdict, **asdict(self)}


def examine(*, root: Path, canary: bool = True) -> Report:
    """Examines this machine. `root` is where runs are to be written; `canary` starts ranks that try their links."""
    checks = [python(sys.version_info[:3]), packages(probes.required(), probes.installed(probes.required()))]
    topology: Topology | None = None
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library that torch needs is missing or broken
        checks.append(_bad("torch", f"cannot be imported: {error}", "pip install --force-reinstall torch"))
    else:
        from headway.dist.topology import machine as topologies, nvml

        topology = topologies.detect()
        checks += machine(topology, nvml.read_driver())
    checks += [*system(), *run_root(root), *launchers()]
    if canary and topology is not None:
        checks.append(interconnect(probes.visible_gpus(len(topology.gpus), os.environ)))
    return Report(host=os.uname().nodename, checks=checks, topology=topology)


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, verdict="ok", detail=detail)


def _warn(name: str, detail: str, advice: str) -> Check:
    return Check(name=name, verdict="warn", detail=detail, advice=advice)


def _bad(name: str, detail: str, advice: str) -> Check:
    return Check(name=name, verdict="bad", detail=detail, advice=advice)


# ---- software


def python(version: tuple[int, ...]) -> Check:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return _bad("python", text, "headway needs Python 3.11 or newer")
    return _ok("python", f"{text} at {sys.executable}")


def packages(required: Mapping[str, str], installed: Mapping[str, str]) -> Check:
    """`required`: the oldest version of each package that will do; `installed`: the versions that are there."""
    if not required:
        return _warn(
            "packages",
            "headway runs from its source, uninstalled: what it needs was not checked",
            "pip install -e .",
        )
    missing = [name for name in required if name not in installed]
    old = [name for name in installed if probes.numbers(installed[name]) < probes.numbers(required[name])]
    if missing or old:
        wrong = [f"{name} is missing" for name in missing] + [
            f"{name} {installed[name]} is too old" for name in old
        ]
        wanted = " ".join(f"'{name}>={required[name]}'" for name in [*missing, *old])
        return _bad("packages", ", ".join(wrong), f"pip install {wanted}")
    return _ok("packages", ", ".join(f"{name} {version}" for name, version in installed.items()))


# ---- GPUs, links, network


def machine(topology: Topology, driver: Driver | None) -> Iterator[Check]:
    """What topology and driver say."""
    yield gpus(topology, driver, torch_cuda=probes.torch_cuda(), device_files=probes.gpu_files())
    if len(topology.gpus) > 1:
        yield gpu_links(topology)
    if topology.ports:
        yield infiniband(topology, locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield host_name(topology, cluster=schedulers.detect() is not None)
    yield cpus(usable_cpus(), os.cpu_count() or 1, gpus=len(topology.gpus))


def gpus(topology: Topology, driver: Driver | None, *, torch_cuda: str | None, device_files: int) -> Check:
    """`torch_cuda`: the CUDA version that torch is built with; `device_files`: how many GPUs /dev shows."""
    if driver is None or not topology.gpus:
        if device_files:
            detail = f"/dev shows {device_files}, but the driver does not answer"
            return _bad("GPUs", detail, "see nvidia-smi; after an update of the driver, restart the machine")
        return _ok("GPUs", "none by NVIDIA; training uses the CPU")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in topology.gpus))
    memory = min(gpu.memory for gpu in topology.gpus) / _GIB
    own = f", {memory:.0f} GiB" if memory else ""
    detail = f"{len(topology.gpus)} x {names}{own}, driver {driver.version}"
    if torch_cuda is None:
        return _bad(
            "GPUs", f"{detail}; torch is built without CUDA", "install a torch with CUDA: see pytorch.org"
        )
    if driver.cuda[0] < probes.numbers(torch_cuda)[0]:
        newest = ".".join(map(str, driver.cuda))
        detail = f"{detail} runs CUDA up to {newest}, and torch is built with {torch_cuda}"
        return _bad("GPUs", detail, f"update the driver, or install a torch for CUDA {driver.cuda[0]}")
    return _ok("GPUs", f"{detail}, torch with CUDA {torch_cuda}")


def gpu_links(topology: Topology) -> Check:
    from headway.dist.topology.machine import describe_gpus

    switched = [link for link in topology.links if link.via == "switch"]
    most = max((link.count for link in switched), default=0)
    weak = [f"{link.a}-{link.b} ({link.count} of {most})" for link in switched if link.count < most]
    if weak:
        detail = f"some pairs have fewer NVLinks: {', '.join(weak[:4])}"
        return _warn("GPU links", detail, "see nvidia-smi nvlink --status, and tell the site")
    return _ok("GPU links", describe_gpus(topology))


def infiniband(topology: Topology, *, locked_memory: int) -> Check:
    from headway.dist.topology.machine import describe_ports

    detail = describe_ports(topology)
    down = [str(port) for port in topology.ports if not port.active]
    if down:
        return _warn(
            "InfiniBand", f"{detail}; down: {', '.join(down)}", "see ibstat; unused ports do no harm"
        )
    if locked_memory != resource.RLIM_INFINITY:
        detail = f"{detail}; locked memory is limited to {locked_memory / 2**20:.0f} MiB"
        return _warn("InfiniBand", detail, "RDMA may fail: ulimit -l unlimited")
    return _ok("InfiniBand", detail)


def host_name(topology: Topology, *, cluster: bool) -> Check:
    if topology.address is None:
        detail = f"{topology.host} resolves to nothing; ranks will use the loopback"
        return _warn("host name", detail, f"add '127.0.1.1 {topology.host}' to /etc/hosts")
    if cluster and ip_address(topology.address).is_loopback:
        detail = f"{topology.host} resolves to {topology.address}, where other nodes cannot reach it"
        return _warn(
            "host name", detail, "set GLOO_SOCKET_IFNAME, if headway does not find the right interface"
        )
    return _ok("host name", f"{topology.host} resolves to {topology.address}")


# ---- the system


def system() -> Iterator[Check]:
    """Memory and limits."""
    memory = psutil.virtual_memory()
    yield host_memory(memory.total, memory.available, limit=resource_limits().memory)
    yield shared_memory(probes.size_of(Path("/dev/shm")))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def cpus(usable: int, total: int, *, gpus: int) -> Check:
    detail = f"{usable} of {total} usable" if usable < total else f"{total}"
    if gpus and usable < 2 * gpus:
        advice = "loading data needs more: ask for them (--cpus-per-task), or check taskset"
        return _warn("CPUs", f"{detail}, for {gpus} GPUs", advice)
    return _ok("CPUs", detail)


def host_memory(total: int, available: int, *, limit: int | None) -> Check:
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if limit is not None and limit < total:
        detail, available = f"{detail}, this process may use {limit / _GIB:.1f}", min(available, limit)
    if available < 2 * _GIB:
        return _warn(
            "memory", detail, "a rank takes about 1 GiB before its model: free some, or ask for more (--mem)"
        )
    return _ok("memory", detail)


def shared_memory(size: int | None) -> Check:
    remedy = "data workers pass batches through it: docker run --shm-size=8g, or --ipc=host"
    if size is None:
        return _bad("/dev/shm", "is not there", remedy)
    if size < _GIB:
        return _warn("/dev/shm", f"{size / 2**20:.0f} MiB", remedy)
    return _ok("/dev/shm", f"{size / _GIB:.1f} GiB")


def open_files(soft: int, hard: int) -> Check:
    if soft == resource.RLIM_INFINITY:
        return _ok("open files", "no limit")
    if soft < 4096:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return _warn("open files", f"at most {soft}", f"data workers and sockets need more: ulimit -n {most}")
    return _ok("open files", f"at most {soft}")


# ---- where runs are written


def run_root(root: Path) -> list[Check]:
    """Can runs be written here, is there room, is a safe write fast, does the file server know the time?"""
    folder = probes.nearest_folder(root)
    try:
        writing = probes.try_writing(folder)
    except OSError as error:
        detail = f"{folder} cannot be written: {error.strerror}"
        return [_bad("run root", detail, "choose another: headway doctor --root PATH")]
    return [
        place(root, filesystem_type(folder) or "unknown", free=shutil.disk_usage(folder).free),
        safe_write(writing.fsync_seconds),
        clock(writing.clock_skew),
    ]


def place(root: Path, kind: str, *, free: int) -> Check:
    detail = f"{root.absolute()} on {kind}, {free / _GIB:.0f} GiB free"
    if free < _GIB:
        return _bad("run root", detail, "checkpoints will not fit: free some space, or choose another --root")
    if kind in ("tmpfs", "ramfs", "overlay"):
        return _warn(
            "run root", detail, "this does not outlive the machine or container: choose another --root"
        )
    if free < 20 * _GIB:
        return _warn("run root", detail, "a few checkpoints of a large model may fill it")
    return _ok("run root", detail)


def safe_write(seconds: float) -> Check:
    detail = f"{seconds * 1000:.1f} ms to write a small file safely"
    if seconds > 0.1:
        return _warn(
            "fsync", detail, "checkpoints will be slow here: a local or parallel file system is faster"
        )
    return _ok("fsync", detail)


def clock(skew: float) -> Check:
    """`skew`: seconds by which the file system's clock is ahead of ours."""
    if abs(skew) > 2:
        side = "ahead of" if skew > 0 else "behind"
        detail = f"the file server's clock is {abs(skew):.0f} s {side} this machine's"
        return _warn(
            "clock", detail, "live runs may look dead: ask the site to synchronise clocks (chrony, ntp)"
        )
    return _ok("clock", "agrees with the file system's")


# ---- other programs


def launchers() -> Iterator[Check]:
    """Who else can start ranks here."""
    for each in schedulers.shipped():
        yield scheduler(each.label, each.health(os.environ))
    mpirun = probes.ask("mpirun", "--version") or probes.ask("mpiexec", "--version")
    yield mpi(mpirun, probes.installed(["mpi4py"]).get("mpi4py"))


def scheduler(label: str, health: Health | None) -> Check:
    """Whether a scheduler can be used from here."""
    if health is None:
        return _ok(label, "not here")
    return _ok(label, health.line) if health.good else _warn(label, health.line, health.advice)


def mpi(version: Answer | None, mpi4py: str | None) -> Check:
    """`version`: what `mpirun --version` says."""
    if version is None:
        return _ok("MPI", "not here")
    if not version.good:
        return _warn("MPI", version.line, "if you mean to use it, load the site's MPI module")
    return _ok("MPI", f"{version.line}, mpi4py {mpi4py or 'not installed'}")


def interconnect(gpus: int) -> Check:
    """Runs ranks that send each other known bytes: one for each GPU, or two on the CPU where there are fewer."""
    processes, device = (gpus, "cuda") if gpus > 1 else (2, "cpu")
    try:
        facts = probes.canary(processes, device)
    except RuntimeError as error:
        command = f"headway run --nproc {processes} -m headway.doctor.canary /dev/stdout {device}"
        return _bad(
            "interconnect", f"{processes} ranks on {device} failed: {error}", f"see it fail: {command}"
        )
    problems = "; ".join(facts["problems"])
    if facts["verdict"] == "wrong":
        return _bad("interconnect", problems, "do not train here: show these lines to the site")
    if facts["verdict"] == "slow" and device == "cuda":  # CPUs with other work make any link look slow
        return _warn("interconnect", problems, "if the machine is idle, show these lines to the site")
    speed = min(link["gigabytes_per_second"] for link in facts["links"])
    return _ok(
        "interconnect", f"{processes} ranks on {device}: all bytes right, slowest link {speed:.1f} GB/s"
    )
