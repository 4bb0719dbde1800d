"""Facts about this machine that take more than a line to get at. Nothing here judges: see `headway.doctor.checks`."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ANSWER_TIMEOUT = 10.0
_CANARY_TIMEOUT = 180.0


def required() -> dict[str, str]:
    """headway's core dependencies and the oldest version of each, as its package says; none if it is not installed."""
    try:
        lines = [line for line in metadata.requires("headway") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        return {}
    return dict(line.split(">=", 1) for line in lines if ">=" in line)


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are there, without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare by.

    >>> numbers("2.13.0+cpu") > numbers("2.9")
    True
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def torch_cuda() -> str | None:
    """The CUDA version that torch is built with, from its files: importing torch takes seconds, and may fail."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    value = ast.literal_eval(match[1]) if match else None
    return value if isinstance(value, str) else None


def gpu_files() -> int:
    """How many GPUs the kernel shows, whether or not the driver answers."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_gpus(found: int, environ: Mapping[str, str]) -> int:
    """How many of the machine's GPUs a process with these variables may use."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return found
    names = [name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    return min(found, len(names))


def size_of(folder: Path) -> int | None:
    """The size of the file system at `folder`, None if there is none."""
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How writing went: the median time of a small safe write, and how far the file system's clock is ahead."""

    fsync_seconds: float
    clock_skew: float


def try_writing(folder: Path) -> Writing:
    """Writes a few small files and removes them again; raises OSError where that is not possible."""
    seconds = []
    for _ in range(5):
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    return Writing(fsync_seconds=statistics.median(seconds), clock_skew=skew)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program answered: whether it did so without complaint, and the first fact that it printed."""

    good: bool
    line: str


def ask(*command: str) -> Answer | None:
    """A program's answer, None if it is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Answer(good=False, line=f"no answer within {_ANSWER_TIMEOUT:.0f} s")
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    first = lines[:2] if lines[0].endswith(":") else lines[:1]  # a heading says nothing by itself
    return Answer(good=done.returncode == 0, line=" ".join(" ".join(first).split()))


def canary(processes: int, device: str) -> dict[str, Any]:
    """What ranks on this machine found when they talked to each other; RuntimeError says why they could not."""
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        file = Path(folder, "interconnect.json")
        command = [sys.executable, "-m", "headway", "run", "--nproc", str(processes)]
        command += ["-m", "headway.doctor.canary", str(file), device]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CANARY_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no result after {_CANARY_TIMEOUT:.0f} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise RuntimeError(f"exit code {done.returncode}: {lines[-1].strip()}")
        facts: dict[str, Any] = json.loads(file.read_text())
        return facts
