"""`Run`: one run directory, its list of attempts and its record of a failure."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final, get_args

from headway import schedulers
from headway.errors import INTERRUPTED, RunLocked, UnreadableRun, UsageError
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
    """One run directory: its paths, all writing to run.json and failure.json, and the fence before every other write.

    In the processes of an attempt, `fence` is the lock that rank 0 holds. What they write into the run passes
    `check_owner`, so that an attempt which another process has replaced writes nothing more.

    >>> run = Run.create("runs", name="digits", config={"lr": 3e-4})  # doctest: +SKIP
    >>> with run.lock():  # doctest: +SKIP
    ...     attempt = run.begin_attempt(world={"world_size": 1})
    ...     run.end_attempt(attempt, status="done", exit_code=0)
    """

    id: str
    name: str
    fence: run_lock.Fence | None = field(default=None, compare=False, repr=False)

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

        `command` is the command line to record, this process's by default, and `source` the state of the code, which
        is asked once for many runs. An invalid name, settings that cannot be written, or a root that cannot be used
        raise `UsageError` and leave nothing behind.
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
        """Opens a run to execute what its files say, after `check_private`; `path` may be a link that headway made."""
        given = Path(path).absolute()
        if given.is_symlink():  # of a job array
            ownership.check_private(given.parent)
            ownership.check_root(given.parent.parent)
        real = given.resolve()
        if has_info(real):
            RunPaths(path=real).check_private()
        run = cls.open(real)
        snapshot = run.info().get("code", {}).get("snapshot") or {}
        tree = real / snapshot.get("tree", "")  # the runs of a sweep use the copy of the first
        for directory in (tree, *tree.parents):
            if directory.parent.resolve().is_relative_to(real.parent):  # the root may be named by a link
                ownership.check_private(directory)
        return run

    def info(self) -> dict[str, Any]:
        """Returns run.json as it is now."""
        return read_info(self.path)

    def lock(self) -> AbstractContextManager[run_lock.RunLock]:
        """Keeps every other process out while the `with` block runs; `RunLocked` names the process that holds the run.

        The lock's `note` is a line to show when the run was taken from an owner without a heartbeat; its `check()`
        raises `RunLocked` when that happened to this process.
        """
        return run_lock.hold(self.lock_dir, attempt=len(self.info()["attempts"]) + 1)

    def held_as(self, owner: int | None) -> Run:
        """Returns this run for a process of an attempt; `owner` is the number of the lock that its rank 0 holds.

        None stands for a process that never held the run.
        """
        fence = None if owner is None else run_lock.Fence(directory=str(self.lock_dir), number=owner)
        return replace(self, fence=fence)

    def check_owner(self) -> None:
        """Raises `RunLocked` if the run is another process's. Call it before each write into the run directory."""
        with files.storage(f"find out who trains in {self.path}"):
            if self.fence is not None:
                self.fence.check()
            else:
                run_lock.check_free(self.lock_dir)

    def is_ours(self) -> bool:
        """Returns whether `check_owner` allows this process to write, and the scheduler did not start its job again."""
        try:
            self.check_owner()
        except RunLocked:
            return False
        return not self.was_replaced()

    def open_rows(
        self, path: Path, *, content: str, default: Callable[[Any], Any] | None = None
    ) -> JsonLinesWriter:
        """Opens a file of rows in this run; a write raises `RunLocked` once the run is another process's."""
        return JsonLinesWriter(path, content=content, default=default, before_write=self.check_owner)

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
        """Writes the settings of a run that was created, at submission, before its script could give them."""
        self.check_owner()
        text = config_text(config)
        with files.storage(f"write {self.config_file}"):
            files.write_atomic(self.config_file, text.encode())
            write_info(self.path, self.info() | {"config": text})

    def has_config(self, text: str) -> bool:
        """Returns whether these are the settings of the run. A damaged copy of them, of two, is written again.

        `UnreadableRun` if there is no whole copy to compare with, and the run has checkpoints.
        """
        info = self.info()
        try:
            found: str | None = files.read_regular(self.config_file).decode()
        except (OSError, ValueError):
            found = None
        if text not in (info.get("config"), found):
            # None: an older version wrote it, or it was rebuilt without them
            if info.get("config") is None and (found is None or not is_yaml(found)):
                self._refuse_damaged_config()
            return False
        if found != text or info.get("config", text) != text:
            self._restore_config(text, info)
        return True

    def _refuse_damaged_config(self) -> None:
        step = newest_step(self.path)
        if step is not None:
            raise UnreadableRun(
                f"{self.config_file} is damaged, and {self.id} has checkpoints up to step {step:,}, perhaps of these "
                f"settings; to resume it, pass resume={str(self.path)!r}, or move it away to start over"
            )

    def _restore_config(self, text: str, info: dict[str, Any]) -> None:
        if not self.is_ours():
            return
        logger.warning(
            "the settings of %s were damaged, and are written again from their second copy", self.id
        )
        with files.storage(f"write {self.config_file}"):
            files.write_atomic(self.config_file, text.encode())
            write_info(self.path, info | {"config": text})

    def record_snapshot(self, facts: Mapping[str, object]) -> None:
        """Records in run.json which copy of the code runs. Jobs are started by these paths: they are not redacted."""
        self.check_owner()
        info = self.info()
        info["code"]["snapshot"] = dict(facts)
        with files.storage(f"record the code of {self.path}"):
            write_info(self.path, info)

    # --- attempts

    def begin_attempt(self, *, world: object) -> int:
        """Records in run.json that training starts; returns the number of the attempt: 1, 2, ...

        Call it under `lock()`: an older attempt that still reads "running" was killed. If it had failed before, it
        left a failure.json, which becomes failure-N.json.
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
        """Adds facts to an attempt in run.json, such as its first step, unless another attempt followed."""
        info = self.info()
        if number == len(info["attempts"]) and self.is_ours():
            info["attempts"][-1] |= facts
            with files.storage(f"write the attempt to {self.path}"):
                write_info(self.path, info)

    def conclude_end(self, attempt: Mapping[str, Any]) -> dict[str, Any]:
        """Returns status and exit code of an attempt that reads "running" and has no process any more.

        Its rank 0 was gone before it could record its end. What that was is concluded from the record of its failure,
        else from that of its supervisor; with neither, the attempt is "lost". The next attempt writes the same to
        run.json as `headway runs` shows before it begins.
        """
        number = attempt["number"]
        # an attempt that began to follow may have set it aside, and been killed before it wrote run.json
        files_of = [self.old_failure_file(number), *([self.failure_file] if number == self._newest() else [])]
        for record in filter(None, map(read_json, reversed(files_of))):
            interrupted = record.get("kind") == "interrupted"
            status, code = ("interrupted", INTERRUPTED) if interrupted else ("failed", 1)
            return {"status": status, "exit_code": record.get("exit_code") or code}
        ended = read_end(self.ended_file)
        if ended and ended["exit_code"] and number == self._newest() and is_end_of(ended, attempt):
            return {"status": state_of(ended["exit_code"]), "exit_code": ended["exit_code"]}
        return {"status": "lost", "exit_code": None}

    def _newest(self) -> int:
        return len(self.info()["attempts"])

    def end_attempt(
        self, number: int, *, status: str, exit_code: int, why: str = "", step: int | None = None
    ) -> None:
        """Records how an attempt ended: "done", "failed", "stopped" (may be resumed) or "interrupted", and why.

        `step` is the last step that it made, for a caller that knows it where rank 0 may not have recorded it.
        An attempt that another one followed has ended when that began, and writes nothing: run.json is no longer its
        own.
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
        """Records how the last attempt ended, if it is that of process `pid` of this host and nobody has recorded it.

        For the parent of rank 0, which knows how that ended and may be the only one left to record it.
        """
        attempts = self.info()["attempts"]
        last = attempts[-1] if attempts else {}
        is_killed = (last.get("status"), last.get("host"), last.get("pid")) == (
            "running",
            socket.gethostname(),
            pid,
        )
        if is_killed and exit_code:  # a rank 0 that left with 0 in the middle of its attempt has not said how
            status = state_of(exit_code)
            self.end_attempt(len(attempts), status=status, exit_code=exit_code, why=why, step=step)

    def was_replaced(self) -> bool:
        """Returns whether the scheduler has started the job of this process again, and the run is the newer start's."""
        with suppress(UsageError):  # run.json cannot be read: a failure must be reported all the same
            attempts = self.info()["attempts"]
            newest = JobIds.from_dict(attempts[-1]) if attempts else None
            return schedulers.is_earlier_start(schedulers.detect(), newest)
        return False

    # --- failures

    def write_failure(self, record: Mapping[str, object], *, instead: bool = False) -> bool:
        """Writes failure.json if there is none, or replaces it with `instead`. Returns whether it was written.

        A process whose run is another one's records no failure: neither one that was refused nor one that was replaced.
        """
        if not self.is_ours():
            return False
        with files.storage(f"write {self.failure_file}"):
            data = to_json(redact_tree(record))
            if instead:
                files.write_atomic(self.failure_file, data)
            return instead or files.publish(self.failure_file, data)

    def set_failure_aside(self, attempt: int) -> None:
        """Renames failure.json, if there is one, to failure-N.json: a new attempt begins."""
        with suppress(FileNotFoundError):
            self.failure_file.rename(self.old_failure_file(attempt))


def find_latest(root: str | os.PathLike[str] = "runs", *, name: str | None = None) -> Run | None:
    """Returns the run that was created last under `root`, of that name if one is given; None if there is none.

    Runs of other users in a shared root do not count: open one of them by its path, with `hw.Run.open`.

    run = hw.find_latest("runs", name="digits")
    loaded = hw.checkpoint.load_latest(run) if run else None
    """
    return next(iter(own_runs(runs_under(root, name=name))), None)


def find_runs(place: str, root: str | os.PathLike[str] = "runs") -> list[Run]:
    """Returns the run at a path; else the one under `root` with this id; else those whose id begins or ends with it.

    If some of the last are this user's, those of others do not count.

    >>> find_runs("x7k2")  # doctest: +SKIP
    [Run(path=PosixPath('/home/me/runs/digits-2026.11.15-14.30-x7k2'), ...)]
    """
    if not place:  # an unset variable of a shell: every id begins with nothing
        return []
    if has_info(Path(place)):
        return [Run.open(place)]
    found = [run for run in runs_under(root) if run.id.startswith(place) or run.id.endswith(f"-{place}")]
    return [run for run in found if run.id == place] or own_runs(found) or found


def own_runs(runs: Sequence[Run]) -> list[Run]:
    """Those that this user or root has made: others may give runs what names and times they like."""
    uids = {os.geteuid(), 0}
    owners = {
        run.path: run.path.lstat().st_uid for run in runs if os.path.lexists(run.path)
    }  # it may be removed
    if not uids.issuperset(owners.values()):
        uids.add(ownership.uid_in(runs[0].path.parent))
    return [run for run in runs if owners.get(run.path) in uids]


def runs_under(
    root: str | os.PathLike[str] = "runs",
    *,
    name: str | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> list[Run]:
    """Returns the runs under `root`, of that name if one is given, the newest first.

    Unfinished directories, links, directories of other kinds and those that other users have closed are skipped; `warn`
    is called with a message for each run that cannot be read.
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
        except UsageError as error:
            if has_info(path) and not _is_closed(path, error):  # else it is not a run, or not yet
                warn(str(error))
            continue
        if name in (None, info["name"]):
            run = Run(path=path.absolute(), id=path.name, name=info["name"])  # run.json could name any id
            found.append((info["created"], run))
    return [run for _, run in sorted(found, key=lambda pair: (pair[0], pair[1].id), reverse=True)]


def _is_closed(path: Path, error: UsageError) -> bool:
    """Whether a directory may not be looked into, and is not a run that this user, or root in a container, has made."""
    if not isinstance(error.__cause__, PermissionError):
        return False
    try:
        return named_run(path) is None or path.lstat().st_uid not in (os.geteuid(), 0)
    except FileNotFoundError:  # removed meanwhile
        return True
