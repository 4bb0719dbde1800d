"""What ranks do together.

`RankExchange` moves small JSON values between ranks, `gather_rows` rows of numbers. Guarded sections let one rank work
while the others wait (`root_first`, `root_only`, `from_root`, `barrier`). Averages are for loops without
DistributedDataParallel. Names are loaded, and torch with them, on first use.
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
    from headway.dist.collective.exchange import (
        RankExchange as RankExchange,
        gather_rows as gather_rows,
        rank_and_size as rank_and_size,
    )
    from headway.dist.collective.guard import (
        barrier as barrier,
        from_root as from_root,
        local_root_first as local_root_first,
        root_first as root_first,
        root_only as root_only,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
