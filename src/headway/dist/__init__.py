"""Joins the ranks of a run: which rank this process is, and what ranks do together.

`init` (`join`) reads the launcher's variables (`environment`), finds the other ranks (`rendezvous`, `roster`), picks a
device, and makes the process group (`group`). `control/` carries failures and stop requests between ranks, `failure/`
records them, `collective/` has guarded sections and the exchange of values, `topology/` describes the machine's links.
The names below are loaded, and torch with them, on first use: reading a launcher's environment needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.dist.collective.averaging import (
        average_gradients as average_gradients,
        average_parameters as average_parameters,
        optimizer_to as optimizer_to,
    )
    from headway.dist.collective.guard import (
        barrier as barrier,
        local_root_first as local_root_first,
        root_first as root_first,
        root_only as root_only,
    )
    from headway.dist.failure.capture import no_hang_check as no_hang_check, set_phase as set_phase
    from headway.dist.group import (
        World as World,
        is_initialized as is_initialized,
        world as world,
    )
    from headway.dist.join import init as init, leave as leave
    from headway.dist.objects import (
        all_gather_object as all_gather_object,
        broadcast_object as broadcast_object,
        gather_object as gather_object,
        is_root as is_root,
        local_rank as local_rank,
        local_world_size as local_world_size,
        node_rank as node_rank,
        print_rank as print_rank,
        print_root as print_root,
        rank as rank,
        store as store,
        world_size as world_size,
    )
    from headway.dist.seeding import seed as seed
    from headway.dist.shared_run import open_run as open_run
    from headway.dist.topology.interconnect import check_interconnect as check_interconnect

__getattr__, __dir__, __all__ = lazy.exports(__name__)
