"""Join: who am I, who are we?

Launcher detection, the process group, safe root-only work, topology. `init` is the door; everything else may be
called after it.
"""

from headway.dist.averaging import average_gradients, average_parameters, optimizer_to
from headway.dist.failing import set_phase
from headway.dist.group import World, is_initialized, world
from headway.dist.guard import barrier, from_root, local_root_first, root_first, root_only
from headway.dist.interconnect import check_interconnect
from headway.dist.joining import init, leave
from headway.dist.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    is_root,
    local_rank,
    local_world_size,
    node_rank,
    print_rank,
    print_root,
    rank,
    store,
    world_size,
)
from headway.dist.seeding import seed
from headway.dist.shared_run import at_failure, open_run, terminal
from headway.dist.signals import ignore_signals, shielded

__all__ = [
    "World",
    "all_gather_object",
    "at_failure",
    "average_gradients",
    "average_parameters",
    "barrier",
    "broadcast_object",
    "check_interconnect",
    "from_root",
    "gather_object",
    "ignore_signals",
    "init",
    "is_initialized",
    "is_root",
    "leave",
    "local_rank",
    "local_root_first",
    "local_world_size",
    "node_rank",
    "open_run",
    "optimizer_to",
    "print_rank",
    "print_root",
    "rank",
    "root_first",
    "root_only",
    "seed",
    "set_phase",
    "shielded",
    "store",
    "terminal",
    "world",
    "world_size",
]
