"""Collects facts about this machine; `headway.doctor.checks` has the verdicts."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.interpreter import module_command, module_environment

_PROGRAM_TIMEOUT_S = 10.0
_CANARY_TIMEOUT_S = 180.0


def required_versions() -> dict[str, str]:
    """Returns the oldest supported version of each core dependency; empty if headway is not installed."""
    try:
        lines = [line for line in metadata.requires("headway") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        return {}
    return dict(line.split(">=", 1) for line in lines if ">=" in line)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed, without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, for comparison.

    >>> version_numbers("2.13.0+cpu") > version_numbers("2.9")
    True
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def torch_cuda() -> str | None:
    """Returns the CUDA version that torch was built with, without importing torch: that takes seconds and may fail."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    value = ast.literal_eval(match[1]) if match else None
    return value if isinstance(value, str) else None


def count_gpu_files() -> int:
    """Returns the number of GPUs in /dev, whether or not the driver responds."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def sample_gpus() -> list[dict[str, Any]]:
    """Returns an NVML sample of each GPU: load, memory, clocks, throttling and memory errors."""
    from headway.record.devices.gpu import memory_errors, nvml_session, sample_gpu

    with nvml_session() as handles:
        return [sample_gpu(index, handle) | memory_errors(handle) for index, handle in enumerate(handles)]


def visible_gpus(found: int, environ: Mapping[str, str]) -> int:
    """Returns how many of the machine's GPUs a process with these environment variables may use."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return found
    names = [name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    return min(found, len(names))


def filesystem_bytes(directory: Path) -> int | None:
    """Returns the size of the file system at `directory`, None if the directory does not exist."""
    return shutil.disk_usage(directory).total if directory.is_dir() else None


def nearest_directory(path: Path) -> Path:
    """Returns the path itself, or the nearest parent that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


@dataclass(frozen=True, kw_only=True)
class WriteTest:
    """Result of test writes: the median time of a small write with fsync, and the file system's clock skew."""

    fsync_s: float
    clock_skew_s: float
    """seconds by which the file system's clock is ahead of this machine's"""


def measure_write(directory: Path) -> WriteTest:
    """Writes and removes a few small files; raises OSError if that fails."""
    seconds = []
    for _ in range(5):
        with tempfile.TemporaryFile(dir=directory) as file:
            start = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    return WriteTest(fsync_s=statistics.median(seconds), clock_skew_s=skew)


@dataclass(frozen=True, kw_only=True)
class ProgramOutput:
    """Output of a program: whether it exited with 0, and its first informative line."""

    good: bool
    line: str


def run_program(*command: str, timeout_s: float = _PROGRAM_TIMEOUT_S) -> ProgramOutput | None:
    """Runs a program and returns its output, None if it is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ProgramOutput(good=False, line=f"no output within {timeout_s:.0f} s")
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    first = lines[:2] if lines[0].endswith(":") else lines[:1]  # a heading alone has no information
    return ProgramOutput(good=done.returncode == 0, line=" ".join(" ".join(first).split()))


def run_canary(nproc: int, device: str) -> dict[str, Any]:
    """Starts ranks on this machine that test their links; returns the result. RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory(prefix="headway-") as directory:
        file = Path(directory, "interconnect.json")
        command = module_command("headway", "run", "--nproc", str(nproc))
        command += ["-m", "headway.doctor.canary", str(file), device]
        try:
            done = subprocess.run(
                command,
                cwd=directory,  # from which -m imports first
                env=module_environment(),
                capture_output=True,
                text=True,
                timeout=_CANARY_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no result after {_CANARY_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise RuntimeError(f"exit code {done.returncode}: {lines[-1].strip()}")
        facts: dict[str, Any] = json.loads(file.read_text())
        return facts
