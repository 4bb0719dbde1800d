"""Diagnostics: facts about machine, software and code that help to explain a run later. One JSON line per attempt.

Only variables on an allow-list are recorded, and everything is redacted: run directories are copied, mailed and put on
shared disks.
"""

from __future__ import annotations

import os
import platform
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

from headway import schedulers
from headway.dist import World
from headway.dist.topology import nvml
from headway.errors import StorageError
from headway.run import Run, source
from headway.run.plain import to_plain
from headway.system import ownership, redact
from headway.system.limits import resource_limits

Facts = dict[str, Any]

_NAMED_ALIKE = (
    "headway", "torch", "torchvision", "torchaudio", "torchdata", "triton", "numpy", "safetensors", "transformers",
    "datasets", "tokenizers", "accelerate", "peft", "lightning", "timm", "deepspeed", "xformers", "bitsandbytes",
    "webdataset", "simplejpeg", "xarray", "zarr", "scipy", "pandas", "pyarrow", "omegaconf", "wandb", "tensorboard",
    "mlflow", "mpi4py", "cupy", "jax",
)  # fmt: skip

# modules whose versions are recorded, with the names of their distributions
_PACKAGES = {name: name for name in _NAMED_ALIKE} | {
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
    """Collects the facts about this process, without secrets.

    collect()["packages"]["torch"]     # '2.13.0+cu130'
    """
    environment = redact.environment()
    job = schedulers.variables(environment)
    driver = nvml.read_driver()
    facts: Facts = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "user": ownership.user_name(),
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
        "slurm": job,  # the variables of any scheduler
        "environment": {name: value for name, value in environment.items() if name not in job},
    }
    return cast(Facts, redact.redact_tree(facts))


def write(run: Run, facts: Facts) -> None:
    """Appends `facts` to the run's diagnostics as one line.

    write(run, {"attempt": 1, **collect(world, run)})
    """
    with run.open_rows(run.diagnostics_file, content="diagnostics", default=str) as rows:
        rows.write(cast(Facts, redact.redact_tree(facts)))
    if rows.lost:
        raise StorageError(f"could not write {run.diagnostics_file}: {rows.error}; check that file system")


def _virtual() -> dict[str, str]:
    """Returns the virtual environment, venv or conda, if there is one."""
    found = {"venv": sys.prefix} if sys.prefix != sys.base_prefix else {}
    conda = os.environ.get("CONDA_PREFIX")
    return {**found, "conda": conda} if conda else found


def _packages() -> Iterator[tuple[str, str]]:
    for module, distribution in _PACKAGES.items():
        if module in sys.modules:
            with suppress(metadata.PackageNotFoundError):  # another module with that name
                yield distribution, metadata.version(distribution)


def _torch() -> Facts:
    build = torch.version
    return {"version": torch.__version__, "cuda": build.cuda, "hip": build.hip, "commit": build.git_version}


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type


def _machine() -> Facts:
    limits = {name: value for name, value in asdict(resource_limits()).items() if value is not None}
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(psutil.Process().cpu_affinity() or ()) if platform.system() == "Linux" else None,
        "memory": psutil.virtual_memory().total,
        "limits": {**limits, "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]},
        "shared_memory": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    }


def _code() -> Facts:
    state = source.describe(Path.cwd())
    return {"commit": state.commit, "branch": state.branch, "dirty": state.dirty, "note": state.note}
