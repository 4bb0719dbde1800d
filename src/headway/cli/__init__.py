"""The `headway` command. Each verb has a module that parses, calls one package, and prints.

The module of a verb is imported only when it is called, so `headway --help` does not import torch.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any, TextIO, final

import headway
from headway.errors import DONE, INTERRUPTED, HeadwayError, StorageError, UsageError, escape_controls
from headway.system.log import install_handler

VERBS = {
    "agent": "start the ranks of this node; srun and mpirun call it, one per node",
    "cache": "list the shards that your jobs keep on this node, or remove those of killed jobs",
    "checkpoint": "show or verify a checkpoint, or export its weights as safetensors",
    "compare": "show runs side by side: settings that differ, state, and metrics",
    "completion": "print a completion script for bash, zsh or fish",
    "data": "list, count, add, pack, index, check or measure datasets and their shards",
    "demo": "take a tour on this machine: a small training is killed, resumed, and compared with an uninterrupted one",
    "doctor": "check whether this machine, or nodes of a cluster, are fit to train",
    "plan": "estimate memory, time and cost of a layout or of your own module, or search the best layouts",
    "verify-resume": "kill a script at four points, resume it, and compare every step to the last bit",
    "resume": "restart a stopped or failed run as it was started",
    "run": "run a script here, on N processes that start and end together",
    "runs": "list runs: queued, running, done, stopped or failed, and why",
    "watch": "show a run live in the terminal: state, losses, speed, ranks, checkpoints, messages",
    "web": "show runs in a browser: live curves, ranks, settings, logs, sweeps",
    "report": "write a run as one HTML file: curves, where the time went, settings, code, failure",
    "submit": "submit a SLURM job that runs the code as it is now, and resumes after a preemption",
}

_HELP = """\
headway {version}: from a training script to a cluster, without losing a step

usage: headway VERB [OPTIONS] ...

{verbs}

examples:
  headway demo
  headway run --nproc 2 train.py --lr 3e-4
  headway plan --help
  headway doctor --json

`headway VERB --help` explains a verb.
"""


def help_text() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {does}" for verb, does in sorted(VERBS.items()))
    return _HELP.format(version=headway.__version__, verbs=verbs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. Prints a `HeadwayError`, or an error of a file, as one sentence."""
    _open_closed_streams()
    install_handler()
    _allow_any_text()
    args = list(sys.argv[1:] if argv is None else argv)
    with _printing_safely():
        return _run(args)


def _run(args: list[str]) -> int:
    try:
        code = _call(args)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except HeadwayError as error:
        return _report(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `headway ... | head`: the reader has closed the pipe
        _discard_output()
        return DONE
    except OSError as error:
        return _report_storage(error)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich turns a closed pipe into SystemExit
            return DONE
        raise


def _open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed, as by `>&-`: Python sets these to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the number of the stream, the lowest that is free
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))


def _allow_any_text() -> None:
    """Escapes characters that the terminal's encoding lacks, as in names of files that are not UTF-8."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@final
class EscapingStream:
    """Escapes control characters in what is printed: names in it come from files. Colors of rich are not affected."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """where rich writes instead: `EscapingConsole` escapes texts, and not their colors"""

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(escape_controls(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def _printing_safely() -> Iterator[None]:
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EscapingStream(out), EscapingStream(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def _report(error: HeadwayError) -> int:
    print(f"headway: {error}", file=sys.stderr)
    return error.exit_code


def _report_storage(error: OSError) -> int:
    """Reports a file that cannot be read, or a full disk; raises any other error again."""
    if error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return _report(StorageError(f"{name}: {error.strerror}; check its owner, mode and file system"))
    if isinstance(error, FileNotFoundError):
        if _has_working_directory():
            return _report(
                StorageError(
                    f"{error.strerror or error}; for temporary files, TMPDIR names another directory"
                )
            )
        return _report(UsageError("the working directory no longer exists: cd to one that does"))
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        raise error
    _discard_output()
    return _report(StorageError(f"the output could not be written: {error.strerror}"))


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Discards buffered output: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _call(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return DONE
    if args[0] in ("-V", "--version"):
        print(f"headway {headway.__version__}")
        return DONE
    if args[0] not in VERBS:
        from headway.cli.parser import unknown_verb

        raise unknown_verb(args[0], [*VERBS, "--version", "--help"])
    verb = import_module(f"headway.cli.{args[0].replace('-', '_')}")
    return int(verb.main(args[1:]))
