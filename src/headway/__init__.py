"""headway takes a PyTorch training script from a laptop to a SLURM cluster and does not lose a step on the way.

    import headway as hw

    world = hw.init()            # torchrun, srun, mpirun, headway run, or nothing: the same script
    hw.print_root(f"{world.world_size} ranks")

Importing headway does no work and does not import torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway import (
        checkpoint as checkpoint,
        data as data,
        dist as dist,
        errors as errors,
        plan as plan,
        record as record,
        testing as testing,
        train as train,
    )
    from headway.dist import (
        World as World,
        all_gather_object as all_gather_object,
        barrier as barrier,
        broadcast_object as broadcast_object,
        gather_object as gather_object,
        init as init,
        is_root as is_root,
        local_rank as local_rank,
        local_root_first as local_root_first,
        local_world_size as local_world_size,
        node_rank as node_rank,
        print_rank as print_rank,
        print_root as print_root,
        rank as rank,
        root_first as root_first,
        root_only as root_only,
        seed as seed,
        world_size as world_size,
    )
    from headway.launcher import (
        Job as Job,
        Local as Local,
        Mpi as Mpi,
        Slurm as Slurm,
        as_completed as as_completed,
        launch as launch,
    )
    from headway.run import Run as Run, find_latest as find_latest
    from headway.train import (
        Callback as Callback,
        Pipeline as Pipeline,
        Stage as Stage,
        TrainValStage as TrainValStage,
        scale_lr as scale_lr,
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy.exports(__name__)
