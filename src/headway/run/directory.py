"""`Run`: one run directory, its list of attempts and its failure record; and the search for runs under a root."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final, get_args

from headway import schedulers
from headway.errors import INTERRUPTED, HeadwayError, RunLocked, StorageError, UnreadableRun, UsageError
from headway.run import lock as run_lock
from headway.run.creation import check_name, config_text, create_directory
from headway.run.exit_codes import EndState, state_of
from headway.run.info import (
    format_time,
    has_info,
    is_end_of,
    newest_step,
    read_end,
    read_info,
    read_json,
    to_json,
    write_info,
)
from headway.run.paths import RunPaths
from headway.run.plain import is_yaml, to_plain
from headway.run.rebuild import named_run
from headway.run.settings import RunSettings
from headway.run.source import SourceState
from headway.schedulers.base import JobIds
from headway.system import files, ownership
from headway.system.jsonlines import JsonLinesWriter
from headway.system.log import logger
from headway.system.redact import redact, redact_tree

_ATTEMPT_ENDS = get_args(EndState)


@final
@dataclass(frozen=True, kw_only=True)
class Run(RunPaths):
    """One run directory: its paths, the writer of run.json and failure.json, and the check before every other write.

    In the processes of an attempt, `fence` stands for the lock that rank 0 holds. They call `check_owner` before they
    write into the run, so an attempt that another process has replaced writes nothing more.

    >>> run = Run.create("runs", name="digits", config={"lr": 3e-4})  # doctest: +SKIP
    >>> with run.lock():  # doctest: +SKIP
    ...     attempt = run.begin_attempt(world={"world_size": 1})
    ...     run.end_attempt(attempt, status="done", exit_code=0)
    """

    id: str
    name: str
    fence: run_lock.Fence | None = field(default=None, compare=False, repr=False)

    @property
    def shell_path(self) -> str:
        """The path of the run, quoted for a shell, for commands that people paste."""
        return shlex.quote(str(self.path))

    @property
    def shell_name(self) -> str:
        """How a command line names the run: by its id, which commands look up in ./runs, or by its path."""
        with suppress(OSError):  # there is no such directory
            if self.path.parent.samefile("runs"):
                return self.id
        return self.shell_path

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str] = "runs",
        *,
        name: str = "run",
        config: object = None,
        command: Sequence[str] | None = None,
        world: object = None,
        source: SourceState | None = None,
    ) -> Run:
        """Makes a new run directory under `root`, and `root` too if only that is missing.

        `command` is the command line to record, by default that of this process. `source` is the state of the code,
        for callers that create many runs and read it once. An invalid name, settings that cannot be written, or a
        root that cannot be used raise `UsageError` and leave nothing behind.
        """
        path = create_directory(
            Path(root).absolute(), name=name, config=config, command=command, world=world, source=source
        )
        return cls(path=path, id=path.name, name=name)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Opens an existing run directory; `UsageError` if there is none.

        >>> Run.open("/")
        Traceback (most recent call last):
        headway.errors.UsageError: / is not a run directory: it has no run.json; headway runs lists those under runs
        """
        path = Path(path).absolute()
        info = read_info(path)
        return cls(path=path, id=info["id"], name=info["name"])

    @classmethod
    def open_private(cls, path: str | os.PathLike[str]) -> Run:
        """Opens a run whose files are to be executed, after `check_private`; `path` may be a link that headway made."""
        given = Path(path).absolute()
        if given.is_symlink():  # job arrays have one per task
            ownership.check_private(given.parent)
            ownership.check_root(given.parent.parent)
        real = given.resolve()
        if has_info(real):
            RunPaths(path=real).check_private()
        run = cls.open(real)
        snapshot = run.info().get("code", {}).get("snapshot") or {}
        tree = real / snapshot.get("tree", "")  # the runs of a sweep share the copy of the first
        for directory in (tree, *tree.parents):
            if directory.parent.resolve().is_relative_to(real.parent):  # the path to the root may have links
                ownership.check_private(directory)
        return run

    def info(self) -> dict[str, Any]:
        """Returns run.json as it is now."""
        return read_info(self.path)

    def lock(self) -> AbstractContextManager[run_lock.RunLock]:
        """Locks the run while the `with` block runs; `RunLocked` names the process that holds it.

        The lock's `note` is a line for the user if the run was taken from an owner without a heartbeat; its `check()`
        raises `RunLocked` if another process took the run from this one.
        """
        return run_lock.hold(self.lock_dir, attempt=len(self.info()["attempts"]) + 1)

    def held_as(self, owner: int | None) -> Run:
        """Returns this run for a process of an attempt whose rank 0 holds the lock with the number `owner`.

        None is for a process whose attempt never held the run.
        """
        fence = None if owner is None else run_lock.Fence(directory=str(self.lock_dir), number=owner)
        return replace(self, fence=fence)

    def check_owner(self) -> None:
        """Raises `RunLocked` if another process holds the run. Call it before each write into the run directory."""
        with files.storage(f"find the process that trains in {self.path}"):
            if self.fence is not None:
                self.fence.check()
            else:
                run_lock.check_free(self.lock_dir)

    def _check_before_rows(self) -> None:
        """Does the same before rows: a thousand ranks write them at each log point."""
        if self.fence is None:
            self.check_owner()
            return
        with files.storage(f"find the process that trains in {self.path}"):
            self.fence.check_successor()

    def is_ours(self) -> bool:
        """Returns whether this process may write: it passes `check_owner`, and its job was not started again."""
        try:
            self.check_owner()
        except RunLocked:
            return False
        return not self.was_replaced()

    def open_rows(
        self, path: Path, *, content: str, default: Callable[[Any], Any] | None = None
    ) -> JsonLinesWriter:
        """Opens a file of rows in this run; a write raises `RunLocked` once another process holds the run."""
        return JsonLinesWriter(path, content=content, default=default, before_write=self._check_before_rows)

    def parent_checkpoint(self) -> Path | None:
        """Returns the checkpoint of another run that this one began with; None if it began from scratch."""
        parent = self.info().get("parent")
        return Path(parent["checkpoint"]) if isinstance(parent, dict) else None

    def set_parent(self, checkpoint: Path) -> None:
        """Records the checkpoint of another run that this one begins with, before its first attempt."""
        parent = Run.open(checkpoint.parent.parent)
        step = int(checkpoint.name.removeprefix("step-"))
        facts = {"run": parent.id, "step": step, "checkpoint": str(checkpoint)}
        self.check_owner()
        with files.storage(f"write {self.info_file}"):
            write_info(self.path, self.info() | {"parent": facts})

    def set_config(self, config: object) -> None:
        """Writes the settings of a run: it was created before its script could pass them, or is resumed with others."""
        self.check_owner()
        self._write_config(config_text(config))

    def set_command(self, command: Sequence[str]) -> None:
        """Records another command line, without its secrets: that of the newest attempt."""
        self.check_owner()
        with files.storage(f"write {self.info_file}"):
            write_info(self.path, self.info() | {"command": list(command)})

    def _write_config(self, text: str) -> None:
        with files.storage(f"write {self.config_file}"):
            files.write_atomic(self.config_file, text.encode())
            write_info(self.path, self.info() | {"config": text})

    def has_config(self, settings: RunSettings) -> bool:
        """Returns whether the run has these settings. If one of its two copies is damaged, it is restored.

        `UnreadableRun` if run.json has no copy, config.yaml is damaged, and the run has checkpoints.
        """
        info = self.info()
        try:
            found: str | None = files.read_regular(self.config_file).decode()
        except (OSError, ValueError):
            found = None
        copies = [copy for copy in (info.get("config"), found) if copy is not None]
        text = next(filter(settings.match, copies), None)
        if text is None:
            # run.json has no copy if it was rebuilt without one
            if info.get("config") is None and (found is None or not is_yaml(found)):
                self._refuse_damaged_config()
            return False
        if (found != text or info.get("config", text) != text) and self.is_ours():
            logger.warning(
                "the settings of %s were damaged, and are restored from their second copy", self.id
            )
            self._write_config(text)
        return True

    def _refuse_damaged_config(self) -> None:
        step = newest_step(self.path)
        if step is not None:
            raise UnreadableRun(
                f"{self.config_file} is damaged, and {self.id} has checkpoints up to step {step:,}, perhaps of these "
                f"settings; to resume it, pass resume={str(self.path)!r}, or move it away to start over"
            )

    def record_snapshot(self, facts: Mapping[str, object]) -> None:
        """Records in run.json which copy of the code runs. Its paths are not redacted, since jobs start from them."""
        self.check_owner()
        info = self.info()
        info["code"]["snapshot"] = dict(facts)
        with files.storage(f"record the code of {self.path}"):
            write_info(self.path, info)

    # --- attempts

    def begin_attempt(self, *, world: object) -> int:
        """Records in run.json that training starts; returns the number of the attempt: 1, 2, ...

        Call it under `lock()`: an earlier attempt whose status is still "running" was killed. A failure.json that an
        earlier attempt left is renamed to failure-N.json.
        """
        self.check_owner()
        info = self.info()
        for attempt in info["attempts"]:
            if attempt["status"] == "running":
                attempt |= self.conclude_end(attempt)
        number, saved = len(info["attempts"]) + 1, newest_step(self.path)
        info["attempts"].append(
            {
                "number": number,
                "status": "running",
                "exit_code": None,
                "started": format_time(datetime.now(UTC)),
                "ended": None,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                **(job.to_dict() if (job := schedulers.detect()) else {"scheduler": None, "ids": {}}),
                "world": redact_tree(to_plain(world)),
                **({} if saved is None else {"newest_step": saved}),
            }
        )
        with files.storage(f"begin attempt {number} in {self.path}"):
            self.set_failure_aside(number - 1)
            write_info(self.path, info)
        return number

    def note_attempt(self, number: int, **facts: int) -> None:
        """Adds facts to the current attempt in run.json, such as its first step; does nothing for an earlier one."""
        info = self.info()
        if number == len(info["attempts"]) and self.is_ours():
            info["attempts"][-1] |= facts
            with files.storage(f"write the attempt to {self.path}"):
                write_info(self.path, info)

    def conclude_end(self, attempt: Mapping[str, Any]) -> dict[str, Any]:
        """Returns status and exit code of an attempt whose status is "running" although its processes have ended.

        Rank 0 ended before it could record how. The failure record shows it, else that of the supervisor; without
        either, the attempt is "lost". `headway runs` shows this status, and the next attempt writes it to run.json.
        """
        number = attempt["number"]
        is_newest = number == len(self.info()["attempts"])
        # the next attempt may have renamed failure.json, and been killed before it wrote run.json
        records = [self.failure_file] if is_newest else []
        for record in filter(None, map(read_json, [*records, self.old_failure_file(number)])):
            interrupted = record.get("kind") == "interrupted"
            status, code = ("interrupted", INTERRUPTED) if interrupted else ("failed", 1)
            return {"status": status, "exit_code": record.get("exit_code") or code}
        ended = read_end(self.ended_file)
        if ended and ended["exit_code"] and is_newest and is_end_of(ended, attempt):
            return {"status": state_of(ended["exit_code"]), "exit_code": ended["exit_code"]}
        return {"status": "lost", "exit_code": None}

    def end_attempt(
        self, number: int, *, status: str, exit_code: int, why: str = "", step: int | None = None
    ) -> None:
        """Records how an attempt ended: "done", "failed", "stopped" (may be resumed) or "interrupted", and why.

        `step` is its last step, from a caller that knows it when rank 0 may not have recorded it. Does nothing for an
        earlier attempt: it ended when the next one began.
        """
        info = self.info()
        if status not in _ATTEMPT_ENDS or not 1 <= number <= len(info["attempts"]):
            raise UsageError(
                f"cannot end attempt {number!r} as {status!r}: {self.id} has {len(info['attempts'])} attempts, "
                f"and they end as one of {', '.join(_ATTEMPT_ENDS)}"
            )
        if number < len(info["attempts"]) or not self.is_ours():
            return
        attempt = info["attempts"][number - 1]
        if step is not None and "step_started" in attempt:
            attempt.setdefault("step_ended", step)
        attempt |= {
            "status": status,
            "exit_code": exit_code,
            "ended": format_time(datetime.now(UTC)),
            **({"why": redact(why)} if why else {}),
        }
        with files.storage(f"end attempt {number} in {self.path}"):
            write_info(self.path, info)

    def end_killed_attempt(self, pid: int, exit_code: int, *, why: str = "", step: int | None = None) -> None:
        """Records how the last attempt ended, if process `pid` of this host began it and recorded no failure.

        For the parent of rank 0, which has its exit code and may be the only process left to record it.
        """
        attempts = self.info()["attempts"]
        last = attempts[-1] if attempts else {}
        begun_by = last.get("status"), last.get("host"), last.get("pid")
        # exit code 0 in the middle of an attempt does not show how it ended
        if exit_code and begun_by == ("running", socket.gethostname(), pid):
            status = state_of(exit_code)
            self.end_attempt(len(attempts), status=status, exit_code=exit_code, why=why, step=step)
        elif exit_code and last.get("script_ended") and begun_by == ("done", socket.gethostname(), pid):
            # a process failed after all ranks had left, while it exited
            self.note_attempt(len(attempts), script_ended=False)

    def was_replaced(self) -> bool:
        """Returns whether the scheduler has started this process's job again, and the newer start has the run."""
        with suppress(UsageError):  # a failure must be reported even if run.json cannot be read
            attempts = self.info()["attempts"]
            newest = JobIds.from_dict(attempts[-1]) if attempts else None
            return schedulers.is_earlier_start(schedulers.detect(), newest)
        return False

    # --- failures

    def write_failure(self, record: Mapping[str, object], *, overwrite: bool = False) -> bool:
        """Writes failure.json if there is none, or with `overwrite` replaces it. Returns whether it was written.

        A process that does not hold the run records no failure, whether it was refused or replaced.
        """
        if not self.is_ours():
            return False
        with files.storage(f"write {self.failure_file}"):
            data = to_json(redact_tree(record))
            if overwrite:
                files.write_atomic(self.failure_file, data)
            return overwrite or files.publish(self.failure_file, data, durable=False)  # the ranks wait for it

    def set_failure_aside(self, attempt: int) -> None:
        """Renames failure.json, if there is one, to failure-N.json, before a new attempt begins."""
        with suppress(FileNotFoundError):
            self.failure_file.rename(self.old_failure_file(attempt))


def find_latest(root: str | os.PathLike[str] = "runs", *, name: str | None = None) -> Run | None:
    """Returns the newest run under `root`, with that name if one is given; None if there is none.

    Runs of other users in a shared root do not count: open one of them by its path, with `hw.Run.open`.

    run = hw.find_latest("runs", name="digits")
    loaded = hw.checkpoint.load_latest(run) if run else None
    """
    return next(iter(own_runs(runs_under(root, name=name))), None)


def find_runs(place: str, root: str | os.PathLike[str] = "runs") -> list[Run]:
    """Returns the run at a path; else the one under `root` with this id; else those whose id begins or ends with it.

    In the last case, runs of other users count only if none is this user's.

    >>> find_runs("x7k2")  # doctest: +SKIP
    [Run(path=PosixPath('/home/me/runs/digits-2026.11.15-14.30-x7k2'), ...)]
    """
    if not place:  # an unset variable in a shell: every id begins with an empty string
        return []
    if has_info(Path(place)):
        return [Run.open(place)]
    found = [run for run in runs_under(root) if run.id.startswith(place) or run.id.endswith(f"-{place}")]
    return [run for run in found if run.id == place] or own_runs(found) or found


def own_runs(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that this user or root made: other users may give theirs any name and time."""
    uids = {os.geteuid(), 0}
    # a run may have been removed since it was listed
    owners = {run.path: run.path.lstat().st_uid for run in runs if os.path.lexists(run.path)}
    if not uids.issuperset(owners.values()):
        uids.add(ownership.uid_in(runs[0].path.parent))
    return [run for run in runs if owners.get(run.path) in uids]


def runs_under(
    root: str | os.PathLike[str] = "runs",
    *,
    name: str | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> list[Run]:
    """Returns the runs under `root`, with that name if one is given, the newest first.

    Skips unfinished directories, links, directories that are not runs, and those that other users do not share. Calls
    `warn` with a message for each run that cannot be read.
    """
    if name is not None:
        check_name(name)
    try:
        with os.scandir(root) as entries:
            visible = (entry for entry in entries if not entry.name.startswith("."))
            paths = [Path(entry) for entry in visible if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"cannot read {root}: {error.strerror}; give the directory that holds your runs"
        ) from error
    found: list[tuple[str, Run]] = []
    for path in paths:
        try:
            info = read_info(path)
        except (UsageError, StorageError) as error:  # StorageError: its checkpoints cannot be listed
            if has_info(path) and not _is_closed(path, error):
                warn(str(error))
            continue
        if name in (None, info["name"]):
            # the id is the name of the directory: another user's run.json could have any
            run = Run(path=path.absolute(), id=path.name, name=info["name"])
            found.append((info["created"], run))
    return [run for _, run in sorted(found, key=lambda pair: (pair[0], pair[1].id), reverse=True)]


def _is_closed(path: Path, error: HeadwayError) -> bool:
    """Returns whether a directory is inaccessible, and not a run that this user, or root in a container, made."""
    if not isinstance(error.__cause__, PermissionError):
        return False
    try:
        return named_run(path) is None or path.lstat().st_uid not in (os.geteuid(), 0)
    except FileNotFoundError:  # removed in the meantime
        return True
