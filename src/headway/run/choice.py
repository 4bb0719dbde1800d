"""The choice of the run to train in: a given one, the one of this job, an unfinished one, or a new one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

from headway import schedulers
from headway.errors import RunLocked, StorageError, UnreadableRun, UsageError
from headway.run import Run, has_info, runs_under
from headway.run.info import newest_step
from headway.run.lock import newest_owner
from headway.run.passed_over import MAX_NAMED, PassedOver, describe, examine, failed_at_prompt
from headway.run.paths import RunPaths, step_of
from headway.run.plain import is_yaml
from headway.run.rebuild import named_run
from headway.run.settings import RunSettings
from headway.schedulers.base import JobIds
from headway.system import environment, files, ownership
from headway.system.log import logger
from headway.system.redact import redact_argv

NEW = "new"
"""`Choice.why` of a run that was created"""


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The run to train in, why it was chosen, and whether it is finished already."""

    run: Run
    why: str
    finished: bool = False
    parent: Path | None = None
    """the checkpoint of another run to start from, while the run has no checkpoint yet"""


def choose(
    root: str | Path,
    *,
    name: str,
    config: object,
    world: object,
    resume: str | Path,
    free: Collection[str] = (),
    opened: Collection[Path] = (),
    environ: Mapping[str, str] = os.environ,
) -> Choice:
    """Chooses or creates a run. `resume` is "auto", "never", "must", or the directory of the run to resume.

    If `resume` is a checkpoint of a run, a new run starts from it and records it as its parent; the same call resumes
    the new run while it is unfinished.

    Settings that `free` names do not identify a run. `opened` are the runs that this process has trained in: the run of
    a job is for its first pipeline only.
    """
    parent, settings = _find_parent(resume), RunSettings.of(config, free)
    given = environ.get(environment.RUN)
    if given is not None and Path(given).absolute() not in opened:
        run = Run.open(given)
        _check_own(run)
        if not run.info()["attempts"]:
            if config is not None:
                run.set_config(config)
            if parent is not None:
                _check_exists(parent)
                run.set_parent(parent)
        trains_further = environment.is_on(environment.APPLY, environ)  # with settings that may allow it
        return Choice(
            run=run,
            why=f"{environment.RUN} names it",
            finished=resume != "never" and _finished(run) and not trains_further,
            parent=parent or run.parent_checkpoint(),
        )
    if parent is None and resume not in ("auto", "never", "must"):
        run = _open(resume)
        return Choice(run=run, why="as requested", finished=_finished(run))
    _check_root(Path(root))
    if resume != "never":
        found, passed_over = _find(Path(root), name, settings, environ, opened, parent)
        if found is not None:
            return replace(found, parent=parent)
        if resume == "must":
            raise _nothing_to_resume(root, name, passed_over)
        if passed_over:
            logger.info(describe(passed_over))
    if parent is not None:
        _check_exists(parent)
    run = Run.create(root, name=name, config=config, world=world)
    if parent is None:
        return Choice(run=run, why=NEW)
    run.set_parent(parent)
    return Choice(run=run, why=f"a new run, from {parent}", parent=parent)


def _nothing_to_resume(root: str | Path, name: str, passed_over: Sequence[PassedOver]) -> UsageError:
    reasons = f" ({'; '.join(each.reason for each in passed_over[:MAX_NAMED])})" if passed_over else ""
    return UsageError(
        f'resume="must", but {root} has no unfinished run {name!r} with these settings{reasons}: start one with '
        'resume="auto", or give the directory of the run'
    )


def _open(path: str | Path) -> Run:
    try:
        run = Run.open(path)
    except UnreadableRun:
        raise
    except UsageError as error:
        raise UsageError(
            f'resume={str(path)!r}: {error}; give "auto", "never", "must" or a run directory'
        ) from error
    _check_own(run)
    return run


def _check_root(root: Path) -> None:
    """Raises `UsageError` if others could replace runs in this root, so that its runs could not be resumed."""
    nearest = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if nearest.is_dir():  # else creating the run fails with a better message
        with _only_warn_without_modes(nearest):
            ownership.check_root(root)


def _check_own(run: Run) -> None:
    """Raises `UsageError` if others could have written files that a start of this run reads, as a job does."""
    with _only_warn_without_modes(run.path):
        Run(path=run.path.resolve(), id=run.id, name=run.name).check_private()
        ownership.check_root(run.path)  # also the links in its path
        if run.checkpoints_dir.exists():
            ownership.check_private(run.checkpoints_dir.resolve())  # it may be a link to another disk


@contextmanager
def _only_warn_without_modes(directory: Path) -> Iterator[None]:
    """Turns a `UsageError` into a warning on a file system without modes, where `chmod` cannot help."""
    try:
        yield
    except UsageError as error:
        if ownership.keeps_modes(directory):
            raise
        logger.warning("%s; training continues, since this file system keeps no modes", error)


def _is_own(path: Path, uids: Collection[int]) -> bool:
    """Returns whether a run is this user's: other users' runs in a shared directory are not resumed."""
    return path.stat().st_uid in uids


def _warn_of_others(runs: Iterable[Run]) -> None:
    """Warns of the newest run with checkpoints that is not resumed only because another user owns it."""
    for run in runs:
        step = None
        with suppress(StorageError):  # their checkpoints may be where this user may not look
            step = newest_step(run.path)
        if step is not None:
            logger.warning(
                "%s has checkpoints up to step %s, and is not resumed: it belongs to %s; if it is yours, chown it",
                run.path,
                f"{step:,}",
                ownership.user(run.path.stat().st_uid),
            )
            return


def _warn_of_doubt(run: Run) -> None:
    """Warns of a finished run that is not restored because its script may still run on another machine."""
    owner = newest_owner(run.lock_dir)
    logger.warning(
        "%s is finished and not restored, as its script may still run on %s; to resume it, set HEADWAY_RUN=%s",
        run.id,
        owner.host if owner else "another machine",
        run.shell_path,
    )


def _find_parent(resume: str | Path) -> Path | None:
    """Returns the checkpoint that a new run is to start from; None if `resume` is not one.

    It may be gone, and its run, too: a run that began with it is resumed from checkpoints of its own.
    """
    path = Path(resume).absolute()
    is_gone = step_of(path.name) is not None and not os.path.lexists(path)
    is_one = path.name.startswith("step-") and has_info(path.parent.parent)
    return path if is_one or is_gone else None


def _check_exists(parent: Path) -> None:
    """Raises `UsageError` if there is no checkpoint for a new run to start from."""
    if not parent.is_dir():
        run = parent.parent.parent
        known = f"list those of the run with: headway checkpoint show {shlex.quote(str(run))}"
        advice = known if run.is_dir() else f"nor is there the run {run.name}; choose another checkpoint"
        raise UsageError(f"resume={str(parent)!r}: there is no such checkpoint; {advice}")


def _warn_of_damage(beginning: str, problem: str) -> None:
    """Warns of a run that cannot be read, if its path begins as those of the runs of this name do."""
    if problem.startswith(beginning):
        logger.warning("%s; it is not resumed", problem)


def _find(
    root: Path,
    name: str,
    settings: RunSettings,
    environ: Mapping[str, str],
    opened: Collection[Path],
    parent: Path | None,
) -> tuple[Choice | None, list[PassedOver]]:
    """Returns the newest run with this name, these settings and this parent to resume, or why each is not resumed.

    It was begun by this job, is unfinished, or is finished but its script was killed before its end.
    """
    uids = {os.geteuid(), ownership.uid_in(root)}
    named = runs_under(root, name=name, warn=partial(_warn_of_damage, str(root / f"{name}-")))
    own = [run for run in named if _is_own(run.path, uids)]
    alike = [run for run in own if run.parent_checkpoint() == parent and run.has_config(settings)]
    if found := _find_of_job(alike, environ):
        return found, []
    doubtful = None
    for run in alike:
        if _finished(run) and run.path not in opened:
            cut = script_was_cut(run)
            if cut:
                _check_own(run)
                return Choice(run=run, why="its script had not ended", finished=True), []
            doubtful = run if cut is None and doubtful is None else doubtful
        if run.info()["attempts"] and not _finished(run) and not failed_at_prompt(run) and _is_free(run):
            _check_own(run)
            why = f"the newest unfinished run of that name with these settings{_other_command(run)}"
            return Choice(run=run, why=why), []
    _check_unreadable(root, name, settings, uids)
    if doubtful is not None:
        _warn_of_doubt(doubtful)
    _warn_of_others(run for run in named if not _is_own(run.path, uids))
    return None, [examine(run, settings, parent) for run in own if run != doubtful]


def _find_of_job(alike: Iterable[Run], environ: Mapping[str, str]) -> Choice | None:
    """Returns the run that an earlier start of this job began: one start may train in several runs."""
    job = schedulers.detect(environ)
    if job is None:
        return None
    for run in alike:
        begun = (JobIds.from_dict(attempt) for attempt in run.info()["attempts"])
        if any(schedulers.is_earlier_start(ids, job) for ids in begun):
            _check_own(run)
            return Choice(run=run, why=f"begun by {schedulers.describe(job)}", finished=_finished(run))
    return None


def _check_unreadable(root: Path, name: str, settings: RunSettings, uids: Collection[int]) -> None:
    """Raises `UnreadableRun` if a run of that name cannot be resumed only because its run.json is damaged."""
    for path in sorted(root.glob(f"{name}-*")) if root.is_dir() else ():
        if named_run(path) != name or path.is_symlink() or not _is_own(path, uids):
            continue
        try:
            Run.open(path)
        except UnreadableRun:
            file = RunPaths(path=path).config_file
            if (
                not file.exists()
                or not is_yaml(found := files.read_regular(file).decode(errors="replace"))
                or settings.match(found)
            ):
                raise
        except UsageError as error:
            if isinstance(error.__cause__, PermissionError):
                raise  # it may have checkpoints
            continue  # it has none


def _other_command(run: Run) -> str:
    """Returns a note if another command line began this run."""
    begun, now = run.info()["command"][1:], redact_argv(sys.orig_argv)[1:]
    return "" if begun == now else f"; it was started by: {shlex.join(begun):.200}"


def _finished(run: Run) -> bool:
    attempts = run.info()["attempts"]
    return bool(attempts) and attempts[-1]["status"] == "done"


def script_was_cut(run: Run) -> bool | None:
    """Returns whether the script of a finished run was killed before its end.

    None if that is unknown: it was on another machine, and no scheduler reports that its job is over.
    """
    attempts = run.info()["attempts"]
    if not attempts or attempts[-1].get("script_ended", True):  # functions, plain scripts, older versions
        return False
    owner = newest_owner(run.lock_dir)
    if owner is None:
        return True
    alive = owner.identity.is_alive()
    return schedulers.is_gone(owner.job, schedulers.detect()) if alive is None else not alive


def _is_free(run: Run) -> bool:
    try:
        with run.lock():
            return True
    except RunLocked:
        return False
