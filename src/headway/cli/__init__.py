"""The `headway` command. One file per verb: parse, call one room, print; no logic.

A verb's module is imported only when it is called, so `headway --help` answers without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import headway
from headway.errors import DONE, INTERRUPTED, HeadwayError
from headway.system.log import install_handler

VERBS = {
    "agent": "start the ranks of this node; srun and mpirun call it, one per node",
    "cache": "the shards that your jobs keep on this node; clear away what killed jobs left",
    "checkpoint": "what is in a checkpoint, is it whole, and its weights as one safetensors file",
    "compare": "runs side by side: settings that differ, state, and metrics",
    "data": "datasets and their shards: list, count, add, pack, index, check, bench",
    "doctor": "what this machine is and whether it is fit to train: a verdict per line",
    "plan": "memory, time and cost of a run before it starts: of a layout, the best layouts, or your own module",
    "verify-resume": "is a script's training the same when it is killed and goes on? at four points, to the last bit",
    "run": "run a script here, on N processes that live and die together",
    "runs": "which runs there are, and how they are: queued, running, stopped, failed, and why",
    "submit": "a SLURM job that runs the code as it is now, and comes back by itself when it is preempted",
}

_HELP = """\
headway {version}: from a training script to a cluster, without losing a step

usage: headway VERB [OPTIONS] ...

{verbs}

examples:
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
    """Runs one verb and returns its exit code; errors that headway raises on purpose become one sentence."""
    install_handler()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _call(args)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `headway ... | head`: whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return DONE
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # the same, where rich was printing
            return DONE
        raise


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
