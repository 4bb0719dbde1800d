"""A rank of a launched function: joins the others, calls the function, writes its result to the run directory.

Started as `python -m headway.launcher.functions.worker RUN`, by the node agent, `srun` or `mpirun`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from headway.errors import DONE, RunLocked
from headway.launcher.functions import pickled
from headway.launcher.functions.exceptions import error_files, write_error
from headway.run import Run
from headway.system import environment, files, ownership

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ranks = Sequence[Sequence[int]]


@final
@dataclass(frozen=True, kw_only=True)
class Call:
    """call.json: what each rank calls; the function itself and its arguments are in a pickle beside it."""

    function: str
    target: Mapping[str, Any]
    world_size: int
    groups: Ranks | None
    sys_path: Sequence[str]

    def write(self, run: Run) -> None:
        with files.storage(f"write {run.call_dir}"):
            files.write_new(run.call_dir / "call.json", json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, run: Run) -> Call:
        with files.storage(f"read {run.call_dir}"):
            return cls(**json.loads(ownership.read_private(run.call_dir / "call.json")))


def main(argv: Sequence[str]) -> int:
    run = Run.open_private(argv[0])
    call = Call.read(run)
    _prepare_process(run, call)
    from headway import dist
    from headway.dist.shared_run import use_run

    world = dist.init(device=call.target.get("device", "auto"))
    use_run(run)
    result_file = run.call_dir / f"rank-{world.rank:05d}.pickle"
    for file in (result_file, *error_files(run.call_dir, world.rank)):  # of an earlier attempt
        file.unlink(missing_ok=True)
    try:
        function, args, kwargs, upon_finish = pickled.unpack(run.call_dir / "call.pickle", what=call.function)
        if call.groups is not None:
            kwargs = {**kwargs, "group": _group(call.groups, world.rank)}
        result = function(*args, **kwargs)
        _check_owner(run)
        files.write_atomic(result_file, pickled.pack(result, what=f"what {call.function} returned"))
        if upon_finish is not None:
            dist.barrier()  # all ranks have returned, and their results are written
            if world.rank == 0:
                upon_finish(result)
    except RunLocked:  # another process owns the run
        raise
    except BaseException as error:
        _check_owner(run)
        # the traceback starts at the function: the frames above it are headway's and explain nothing
        inner = error.__traceback__ and error.__traceback__.tb_next
        write_error(run.call_dir, error.with_traceback(inner or error.__traceback__), world.rank)
        raise
    return DONE


def _check_owner(run: Run) -> None:
    """Raises `RunLocked` if the function has trained in the run and another process owns it now.

    A rank that has not trained there has no lock to compare: the owner may be rank 0 of its own launch.
    """
    from headway.dist.shared_run import current_run

    trained = current_run()
    if trained is not None and trained.path == run.path and trained.fence is not None:
        trained.check_owner()


def _prepare_process(run: Run, call: Call) -> None:
    """Sets the import path and the variables of the process that launched this one."""
    sys.path[:] = call.sys_path
    # mpirun does not take variables to other hosts
    os.environ.update(call.target.get("env", {}), **{environment.RUN: str(run.path)})
    os.environ.setdefault(environment.RUNS, str(run.path.parent))
    for stream in (sys.stdout, sys.stderr):
        # ranks share the job's log: whole lines, as soon as they are printed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _group(groups: Ranks, rank: int) -> ProcessGroup:
    """Makes all groups and returns this rank's: torch requires every rank to make every group, in the same order."""
    from torch import distributed

    made: list[ProcessGroup] = [distributed.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
