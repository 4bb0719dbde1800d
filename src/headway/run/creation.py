"""Creation of a run directory: it appears under its name when it is complete, or not at all."""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path

from headway import __version__
from headway.errors import HeadwayError, StorageError, UsageError
from headway.run.info import FORMAT, Info, format_time, write_info
from headway.run.paths import RELATIVE, RunPaths
from headway.run.plain import to_plain, to_yaml
from headway.run.source import SourceState, describe
from headway.system import files
from headway.system.failpoints import failpoint
from headway.system.redact import redact, redact_argv, redact_tree

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_SUFFIX_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # without look-alikes
_NAME_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_STORAGE_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def check_name(name: str) -> str:
    """Returns a run name if it is safe in a path, a shell and a scheduler; else raises `UsageError`.

    >>> check_name("digits-v1.2")
    'digits-v1.2'
    """
    if not _RUN_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.80} is not a valid run name: give 1 to 64 letters, digits, '.', '_' or '-', "
            "not starting with '.' or '-'"
        )
    return name


def config_text(config: object) -> str:
    """Returns the text of `config.yaml` for these settings, with secrets redacted."""
    return to_yaml(redact_tree(to_plain(config)))


def create_directory(
    root: Path,
    *,
    name: str,
    config: object,
    command: Sequence[str] | None,
    world: object,
    source: SourceState | None = None,
) -> Path:
    """Makes a new run directory under `root` and returns its path; see `Run.create`."""
    check_name(name)
    settings, world = to_plain(config), to_plain(world)
    now, source = datetime.now().astimezone(), source or describe(Path.cwd())
    info: Info = {
        "format": FORMAT,
        "id": None,
        "name": name,
        "created": format_time(now),
        "command": redact_argv(sys.orig_argv if command is None else command),
        "cwd": redact(str(Path.cwd())),
        "code": _code(source),
        "versions": _versions(),
        "world": redact_tree(world),
        "config": config_text(settings),  # a second copy, in case config.yaml is damaged
        "attempts": [],
    }
    with _staging(root) as staged, files.storage(f"write a new run in {root}"):
        paths = RunPaths(path=staged)
        for directory in (
            paths.code_dir,
            paths.log_dir,
            paths.metrics_dir,
            paths.checkpoints_dir,
            paths.traces_dir,
        ):
            files.make_dir(directory)
        files.write_new(paths.config_file, config_text(settings).encode())
        if source.diff:
            diff = source.diff.encode(errors="surrogateescape")  # bytes that are not UTF-8 stay as they were
            files.write_new(paths.diff_file, diff)
        while True:  # until the name is not taken
            suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(4))
            info["id"] = f"{name}-{now:%Y.%m.%d-%H.%M}-{suffix}"
            write_info(staged, info)
            failpoint("run.create.publish")
            if _rename_new(staged, path := staged.with_name(info["id"])):
                return path


@contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """Makes a hidden directory in `root` for a new run; if the block fails, it is removed."""
    if "\0" in str(root):
        raise UsageError(f"root={str(root)!r} has a null byte: choose a directory that you may write to")
    made_root = False
    staged = root / f".headway-{secrets.token_hex(8)}.tmp"
    try:
        try:
            if not root.is_dir():
                made_root = _make_root(root)
            files.make_dir(staged)
        except OSError as error:
            raise _unusable(root, error) from error
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if made_root:
            with suppress(OSError):  # it may have another run by now
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


def _unusable(root: Path, error: OSError) -> HeadwayError:
    if error.errno in _STORAGE_FAILED:
        return StorageError(
            f"could not create a run in {root}: {error.strerror}; free space or choose another root"
        )
    if isinstance(error, FileNotFoundError):
        return UsageError(
            f"could not create the run root {root}: create {root.parent} first, or choose another root"
        )
    return UsageError(
        f"could not create a run in {str(root)!r}: {error.strerror}; choose a directory that you may write to"
    )


def _rename_new(staged: Path, path: Path) -> bool:
    """Renames a finished run unless the name is taken. Runs are never empty, so rename cannot replace one."""
    if os.path.lexists(path):
        return False
    try:
        staged.rename(path)
    except OSError as error:
        if error.errno in _NAME_TAKEN:
            return False
        raise
    files.sync_dir(path.parent)
    return True


def _code(source: SourceState) -> dict[str, object]:
    """Returns the state of the code for run.json; the diff has its own file."""
    facts = asdict(source) | {"diff": str(RELATIVE.diff_file) if source.diff else None}
    return {name: redact_tree(value) for name, value in facts.items()}


def _versions() -> dict[str, str | None]:
    torch = None
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    return {"headway": __version__, "python": platform.python_version(), "torch": torch}
