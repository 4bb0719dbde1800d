"""Diagnostics: the facts about machine, software and code that explain a run later. One JSON line an attempt.

The environment is recorded by an allow-list, and everything passes through redaction: run directories are
copied, mailed and put on shared disks.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from headway import files, redact, source
from headway.dist import World, nvml
from headway.run import Run
from headway.settings import to_plain

Facts = dict[str, Any]

# modules worth a version, with the name of their distribution where it differs
_PACKAGES = {
    **{
        name: name
        for name in ("headway", "torch", "torchvision", "torchaudio", "torchdata", "triton", "numpy")
    },
    **{
        name: name for name in ("safetensors", "transformers", "datasets", "tokenizers", "accelerate", "peft")
    },
    **{name: name for name in ("lightning", "timm", "deepspeed", "xformers", "bitsandbytes", "webdataset")},
    **{name: name for name in ("simplejpeg", "xarray", "zarr", "scipy", "pandas", "pyarrow", "omegaconf")},
    **{name: name for name in ("wandb", "tensorboard", "mlflow", "mpi4py", "cupy", "jax")},
    "PIL": "pillow",
    "cv2": "opencv-python",
    "flash_attn": "flash-attn",
    "hydra": "hydra-core",
    "lightning_fabric": "lightning-fabric",
    "nvidia.dali": "nvidia-dali",
    "pytorch_lightning": "pytorch-lightning",
    "sklearn": "scikit-learn",
    "streaming": "mosaicml-streaming",
    "transformer_engine": "transformer-engine",
}


def collect(world: World | None = None, run: Run | None = None) -> Facts:
    """The facts about this process, free of secrets.

    collect()["packages"]["torch"]     # '2.13.0+cu130'
    """
    environment = redact.environment()
    slurm = {name: value for name, value in environment.items() if name.startswith("SLURM_")}
    driver = nvml.read_driver()
    facts: Facts = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "user": _user(),
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "argv": sys.orig_argv,
        "run": None if run is None else str(run.path),
        "world": None if world is None else to_plain(world),
        "device": None if world is None else _device(world),
        "python": {"version": platform.python_version(), "executable": sys.executable, **_virtual()},
        "packages": dict(_packages()),
        "torch": _torch(),
        "driver": None if driver is None else asdict(driver),
        "gpus": [
            {"index": g.index, "name": g.name, "memory": g.memory, "uuid": g.uuid} for g in nvml.read_gpus()
        ],
        "machine": _machine(),
        "code": _code(),
        "slurm": slurm,
        "environment": {name: value for name, value in environment.items() if name not in slurm},
    }
    return cast(Facts, redact.redact_tree(facts))


def write(run: Run, facts: Facts) -> None:
    """Appends `facts` to the run's diagnostics as one line.

    write(run, {"attempt": 1, **collect(world, run)})
    """
    line = json.dumps(redact.redact_tree(facts), default=str) + "\n"
    with files.storage(f"write {run.diagnostics_file}"):
        descriptor = files.open_private(run.diagnostics_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line.encode("utf-8", "backslashreplace"))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run as users that no table knows
        return str(os.getuid())


def _virtual() -> dict[str, str]:
    """The virtual environment, venv or conda, if there is one."""
    found = {"venv": sys.prefix} if sys.prefix != sys.base_prefix else {}
    conda = os.environ.get("CONDA_PREFIX")
    return {**found, "conda": conda} if conda else found


def _packages() -> Iterator[tuple[str, str]]:
    for module, distribution in _PACKAGES.items():
        if module in sys.modules:
            with suppress(metadata.PackageNotFoundError):  # somebody's own module of that name
                yield distribution, metadata.version(distribution)


def _torch() -> Facts:
    build = torch.version
    return {"version": torch.__version__, "cuda": build.cuda, "hip": build.hip, "commit": build.git_version}


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type


def _machine() -> Facts:
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(psutil.Process().cpu_affinity() or ()) if platform.system() == "Linux" else None,
        "memory": psutil.virtual_memory().total,
        "limits": {**_cgroup_limits(), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]},
        "shared_memory": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    }


def _cgroup_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Facts:
    """The tightest memory (bytes) and CPU limits on the way up from this process's control group."""
    try:
        entries = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:  # not Linux, or a /proc without it
        return {}
    limits: Facts = {}
    for number, controllers, group in entries:
        if number == "0":  # version 2: one tree for everything
            for directory in _upwards(root, group):
                _tighten(limits, "memory", _number(directory / "memory.max"))
                _tighten(limits, "cpus", _quota(directory / "cpu.max"))
        elif "memory" in controllers.split(","):
            for directory in _upwards(root / "memory", group):
                _tighten(limits, "memory", _number(directory / "memory.limit_in_bytes"))
    return limits


def _upwards(root: Path, group: str) -> Iterator[Path]:
    directory = root / group.lstrip("/")
    yield directory
    while directory != root and root in directory.parents:
        directory = directory.parent
        yield directory


def _tighten(limits: Facts, name: str, value: float | None) -> None:
    if value is not None and value < 1 << 60:  # version 1 writes "no limit" as a very large number
        limits[name] = min(value, limits.get(name, value))


def _number(file: Path) -> int | None:
    return int(text) if (text := _text(file)).isdecimal() else None


def _quota(file: Path) -> float | None:
    quota, _, period = _text(file).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the group has no such controller, or the container does not show it
        return ""


def _code() -> Facts:
    state = source.describe(Path.cwd())
    return {"commit": state.commit, "branch": state.branch, "dirty": state.dirty, "note": state.note}
