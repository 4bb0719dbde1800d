"""The run directory: all that a run writes about itself, and all that others read.

`Run` is the one owner of every path in it; every room asks it.

    runs/digits-2026.11.15-14.30-x7k2/
        run.json                    what ran, from which code, on which versions; the list of attempts
        config.yaml                 the settings, resolved             plan.json, job.sh, report.html
        code/uncommitted.diff       what the commit does not hold      traces/
        code/tree/                  the code as it was when the run was submitted
        log/rank-00000.txt          metrics/rank-00000.jsonl           log/diagnostics.jsonl
        checkpoints/step-000000001000/
        ledger.jsonl                what each step saw and did, if that was asked for
        failure.json                the first failing rank of this attempt (of older attempts: failure-N.json)
        lock/                       who trains here: see runlock
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import HeadwayError, StorageError, UsageError
from headway.run import lock as runlock
from headway.run.plain import to_plain, to_yaml
from headway.run.source import SourceState, describe
from headway.schedulers.base import JobIds
from headway.system import files
from headway.system.failpoints import failpoint
from headway.system.redact import redact, redact_argv, redact_tree

_FORMAT = 1  # of run.json; to be raised when readers of the old form would misunderstand the new one
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_ENDINGS = ("done", "failed", "stopped", "interrupted")
_SUFFIX_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # none that look alike
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_STORAGE_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def check_name(name: str) -> str:
    """Returns the name of a run if it is safe in a path, a shell and a scheduler; else raises `UsageError`.

    >>> check_name("digits-v1.2")
    'digits-v1.2'
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"run name {name!r:.80} cannot be used: take 1 to 64 letters, digits, '.', '_' or '-', "
            "not starting with '.' or '-'"
        )
    return name


def step_name(step: int) -> str:
    """The name of a checkpoint: wide enough that names sort as steps do."""
    return f"step-{step:012d}"


def config_text(config: object) -> str:
    """What `config.yaml` says of these settings: secrets left out."""
    return to_yaml(redact_tree(to_plain(config)))


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory: its paths, and all writing to run.json and failure.json.

    >>> run = Run.create("runs", name="digits", config={"lr": 3e-4})  # doctest: +SKIP
    >>> with run.lock():  # doctest: +SKIP
    ...     attempt = run.begin_attempt(world={"world_size": 1})
    ...     run.end_attempt(attempt, status="done", exit_code=0)
    """

    path: Path
    id: str
    name: str

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str] = "runs",
        *,
        name: str = "run",
        config: object = None,
        command: Sequence[str] | None = None,
        world: object = None,
    ) -> Run:
        """Makes a new run directory under `root`, and `root` too if only that is missing.

        `command` is the command line to record, this process's by default. A bad name, settings that cannot be
        written down, or a root that cannot be used raise `UsageError` and leave nothing behind.
        """
        check_name(name)
        settings, world = to_plain(config), to_plain(world)
        now, source = datetime.now().astimezone(), describe(Path.cwd())
        info: dict[str, Any] = {
            "format": _FORMAT,
            "id": None,
            "name": name,
            "created": _utc(now),
            "command": redact_argv(sys.orig_argv if command is None else command),
            "cwd": redact(str(Path.cwd())),
            "code": _code(source),
            "versions": _versions(),
            "world": redact_tree(world),
            "attempts": [],
        }
        with _staging(Path(root).absolute()) as staged, files.storage(f"write a new run in {root}"):
            for directory in ("code", "log", "metrics", "checkpoints", "traces"):
                files.make_dir(staged / directory)
            files.write_new(staged / "config.yaml", config_text(settings).encode())
            if source.diff:
                diff = source.diff.encode(errors="surrogateescape")  # odd bytes leave as they came
                files.write_new(staged / "code" / "uncommitted.diff", diff)
            while True:  # until the name is new
                suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(4))
                info["id"] = f"{name}-{now:%Y.%m.%d-%H.%M}-{suffix}"
                files.write_atomic(staged / "run.json", _json(info))
                failpoint("run.create.publish")
                if _rename_new(staged, path := staged.with_name(info["id"])):
                    return cls(path=path, id=path.name, name=name)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """The run in an existing directory; `UsageError` if there is none.

        >>> Run.open("/")
        Traceback (most recent call last):
        headway.errors.UsageError: / is not a run directory: it has no run.json
        """
        path = Path(path).absolute()
        info = _read_info(path)
        return cls(path=path, id=info["id"], name=info["name"])

    def info(self) -> dict[str, Any]:
        """run.json as it is now."""
        return _read_info(self.path)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def submission_file(self) -> Path:
        return self.path / "submitted.json"

    @property
    def launch_dir(self) -> Path:
        return self.path / "launch"

    @property
    def sweep_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def call_dir(self) -> Path:
        """A function to call, and what came of it."""
        return self.path / "call"

    @property
    def ended_file(self) -> Path:
        """How the job ended, in the words of whoever kept it: time and exit code."""
        return self.path / "ended.json"

    @property
    def job_log(self) -> Path:
        """What the job wrote to its standard output and error."""
        return self.log_dir / "job.txt"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def failure_file(self) -> Path:
        return self.path / "failure.json"

    @property
    def diagnostics_file(self) -> Path:
        return self.log_dir / "diagnostics.jsonl"

    @property
    def code_dir(self) -> Path:
        return self.path / "code"

    @property
    def snapshot_dir(self) -> Path:
        return self.code_dir / "tree"

    @property
    def log_dir(self) -> Path:
        return self.path / "log"

    @property
    def metrics_dir(self) -> Path:
        return self.path / "metrics"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def traces_dir(self) -> Path:
        return self.path / "traces"

    def log_file(self, rank: int) -> Path:
        return self.log_dir / f"rank-{rank:05d}.txt"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def csv_file(self) -> Path:
        return self.path / "metrics.csv"

    def memory_file(self, rank: int) -> Path:
        """What the allocator said when a rank ran out of memory."""
        return self.log_dir / f"memory-{rank:05d}.txt"

    def sink_log(self, kind: str) -> Path:
        """What the process that feeds a tracker prints."""
        return self.log_dir / f"sink-{kind}.txt"

    def sink_place(self, kind: str) -> Path:
        """How much of the metrics file a tracker has been told, in bytes."""
        return self.metrics_dir / f"sink-{kind}.offset"

    def quarantine_file(self, rank: int) -> Path:
        """Samples that a rank could not use, one line of JSON each."""
        return self.log_dir / f"quarantine-{rank:05d}.jsonl"

    def metrics_file(self, rank: int) -> Path:
        return self.metrics_dir / f"rank-{rank:05d}.jsonl"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / step_name(step)

    def lock(self) -> AbstractContextManager[runlock.RunLock]:
        """Keeps every other process out while the `with` block runs; `RunLocked` names who is in already.

        The lock's `note` is a line to show when a run had to be taken from an owner that fell silent; its
        `check()` raises `RunLocked` when that happened to us.
        """
        return runlock.hold(self.path / "lock", attempt=len(self.info()["attempts"]) + 1)

    def begin_attempt(self, *, world: object) -> int:
        """Notes in run.json that training starts here and now; returns the number of the attempt: 1, 2, ...

        Call it under `lock()`: an older attempt that still reads "running" was killed by then, perhaps because it had
        failed: then it left a failure.json, which is set aside as failure-N.json.
        """
        info = self.info()
        for attempt in info["attempts"]:
            if attempt["status"] == "running":
                attempt["status"] = "failed" if self.failure_file.exists() else "interrupted"
        number = len(info["attempts"]) + 1
        info["attempts"].append(
            {
                "number": number,
                "status": "running",
                "exit_code": None,
                "started": _utc(datetime.now(UTC)),
                "ended": None,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                **(job.to_dict() if (job := schedulers.detect()) else {"scheduler": None, "ids": {}}),
                "world": redact_tree(to_plain(world)),
            }
        )
        with files.storage(f"begin attempt {number} in {self.path}"):
            with suppress(FileNotFoundError):
                self.failure_file.rename(self.path / f"failure-{number - 1}.json")
            files.write_atomic(self.path / "run.json", _json(info))
        return number

    def set_config(self, config: object) -> None:
        """Writes the settings of a run that was made, at submission, before its script could say them."""
        with files.storage(f"write {self.config_file}"):
            files.write_atomic(self.config_file, config_text(config).encode())

    def record_snapshot(self, facts: Mapping[str, object]) -> None:
        """Notes in run.json which copy of the code runs. Jobs are started by these paths, so they are not redacted."""
        info = self.info()
        info["code"]["snapshot"] = dict(facts)
        with files.storage(f"record the code of {self.path}"):
            files.write_atomic(self.path / "run.json", _json(info))

    def end_attempt(self, number: int, *, status: str, exit_code: int) -> None:
        """Notes how an attempt ended: "done", "failed", "stopped" (may be resumed) or "interrupted".

        An attempt that was replaced by another one has ended when that began, and writes nothing: run.json is no longer
        its own.
        """
        info = self.info()
        if status not in _ENDINGS or not 1 <= number <= len(info["attempts"]):
            raise UsageError(
                f"cannot end attempt {number!r} as {status!r}: {self.id} has {len(info['attempts'])} attempts, "
                f"and they end as one of {', '.join(_ENDINGS)}"
            )
        if number < len(info["attempts"]):
            return
        info["attempts"][number - 1] |= {
            "status": status,
            "exit_code": exit_code,
            "ended": _utc(datetime.now(UTC)),
        }
        with files.storage(f"end attempt {number} in {self.path}"):
            files.write_atomic(self.path / "run.json", _json(info))

    def note_attempt(self, number: int, **facts: int) -> None:
        """Adds to what run.json says about an attempt, such as the step it began with, unless it was replaced."""
        info = self.info()
        if number == len(info["attempts"]):
            info["attempts"][-1] |= facts
            with files.storage(f"note the attempt in {self.path}"):
                files.write_atomic(self.path / "run.json", _json(info))

    def write_failure(self, record: Mapping[str, object], *, instead: bool = False) -> bool:
        """Writes failure.json unless another rank was faster, or `instead` of it; of all ranks exactly one gets True.

        An attempt that the scheduler has replaced by another records no failure: the run is about the newer one.
        """
        if self.was_replaced():
            return False
        with files.storage(f"write {self.failure_file}"):
            if instead:
                files.write_atomic(self.failure_file, _json(redact_tree(record)))
            return instead or files.publish(self.failure_file, _json(redact_tree(record)))

    def was_replaced(self) -> bool:
        """Whether the scheduler has started the job of this process again, and the run is the newer start's."""
        with suppress(UsageError):  # run.json cannot be read: whatever failed must be told all the same
            attempts = self.info()["attempts"]
            newest = JobIds.from_dict(attempts[-1]) if attempts else None
            return schedulers.is_earlier_start(schedulers.detect(), newest)
        return False


def find_latest(root: str | os.PathLike[str] = "runs", *, name: str | None = None) -> Run | None:
    """The run that was created last under `root`, of that name if one is given; None if there is none."""
    return next(iter(runs_under(root, name=name)), None)


def runs_under(
    root: str | os.PathLike[str] = "runs",
    *,
    name: str | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Run]:
    """The runs under `root`, of that name if one is given, the newest first.

    Half-made runs, links and directories of other kinds are passed over; `tell` hears of runs that cannot be read.
    """
    if name is not None:
        check_name(name)
    try:
        with os.scandir(root) as entries:
            shown = (entry for entry in entries if not entry.name.startswith("."))
            paths = [Path(entry) for entry in shown if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"cannot read {root}: {error.strerror}; give the directory that holds your runs"
        ) from error
    found: list[tuple[str, str, Path]] = []
    for path in paths:
        try:
            info = _read_info(path)
        except UsageError as error:
            if (path / "run.json").exists():  # else it is not a run, or not yet
                tell(str(error))
            continue
        if name in (None, info["name"]):
            found.append((info["created"], info["id"], path))
    return [Run.open(path) for _, _, path in sorted(found, reverse=True)]


@contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """A hidden directory in `root` for a run in the making; whatever fails, nothing of it stays."""
    made_root = False
    staged = root / f".headway-{secrets.token_hex(8)}.tmp"
    try:
        try:
            if not root.is_dir():
                made_root = _make_root(root)
            files.make_dir(staged)
        except (OSError, ValueError) as error:
            raise _unusable(root, error) from error
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if made_root:
            with suppress(OSError):  # another run may be in it by now
                root.rmdir()
        raise


def _make_root(root: Path) -> bool:
    try:
        files.make_dir(root)
    except FileExistsError:
        if root.is_dir():  # another process was faster
            return False
        raise
    return True


def _unusable(root: Path, error: Exception) -> HeadwayError:
    if isinstance(error, OSError) and error.errno in _STORAGE_TROUBLE:
        return StorageError(
            f"no new run can be made in {root}: {error.strerror}; free space or choose another root"
        )
    if isinstance(error, FileNotFoundError):
        return UsageError(
            f"the run root {root} cannot be made: make {root.parent} first, or choose another root"
        )
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(
        f"no run can be made in {str(root)!r}: {reason}; choose a directory that you may write to"
    )


def _rename_new(staged: Path, path: Path) -> bool:
    """Gives a finished run its name unless that is taken. Runs are never empty, so rename cannot replace one."""
    if os.path.lexists(path):
        return False
    try:
        staged.rename(path)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    files.sync_dir(path.parent)
    return True


def _read_info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads((path / "run.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path} is not a run directory: it has no run.json") from error
    except OSError as error:
        raise UsageError(f"{path}/run.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}/run.json is damaged: {error}") from error
    match info:
        case {"format": int(form), "id": str(), "name": str(), "created": str(), "attempts": list()}:
            if form == _FORMAT:
                return dict(info)
    raise UsageError(
        f"{path}/run.json was not written by this version of headway: format {_FORMAT} is expected"
    )


def _code(source: SourceState) -> dict[str, object]:
    """What run.json says about the code; the changes themselves are a file of their own."""
    facts = asdict(source) | {"diff": "code/uncommitted.diff" if source.diff else None}
    return {name: redact_tree(value) for name, value in facts.items()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"headway": None, "python": platform.python_version(), "torch": None}
    for package in ("headway", "torch"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, default=str).encode() + b"\n"
