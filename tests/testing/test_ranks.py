from __future__ import annotations

import torch
import torch.distributed as c10d

import headway
from headway.testing import ranks


@ranks(2)
def test_ranks_form_a_group() -> None:
    mine = torch.tensor([float(headway.rank() + 1)])
    c10d.all_reduce(mine)
    assert mine.item() == 3
    assert headway.world_size() == 2
    assert c10d.get_backend() == "gloo"


@ranks(1)
def test_a_group_of_one() -> None:
    assert headway.world_size() == 1
    assert c10d.get_world_size() == 1
    c10d.barrier()
