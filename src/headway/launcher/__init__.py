"""Starts N processes, here, on a cluster or under MPI, and ends them together. No torch at import.

`targets` describes where to run. `launch_function.launch` runs a function there and `submit_script.submit` a script;
both submit to a scheduler through `enqueue`. `job.Job` is a started job, and `job_start` starts and resumes it.
`agent/` starts and supervises the ranks of a node, `functions/` sends a function to the ranks and its results back, and
`code/` copies the code. `prologue` and `epilogue` are the first and last command of a submitted job.
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
