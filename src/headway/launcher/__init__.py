"""Start: get N processes going, here, on a cluster or under MPI, and end them together. No torch at import.

`targets` describes where to run, `launch_function.launch` runs a function there and `submit_script.submit` a script,
both through `enqueue` where a scheduler is asked; `job.Job` is what was started, and `job_start` starts
it, also to resume it. `agent/` starts and supervises the ranks of a node, `functions/` carries a function and its
results, `code/` keeps the code as it was. `prologue` and `epilogue` are the first and last command of a submitted job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.launcher.job import Job as Job, as_completed as as_completed
    from headway.launcher.launch_function import launch as launch
    from headway.launcher.targets import (
        ClusterTarget as ClusterTarget,
        Local as Local,
        Mpi as Mpi,
        Slurm as Slurm,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
