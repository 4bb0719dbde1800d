"""Twenty lines that must say the same under every launcher: who is where, and one all-reduce over all ranks."""

import sys

import torch
import torch.distributed

import headway as hw


def main() -> None:
    world = hw.init(device="cpu")
    total = torch.tensor([float(world.rank + 1)])
    torch.distributed.all_reduce(total)
    line = (
        f"{world.launcher} rank {world.rank}/{world.world_size} "
        f"local {world.local_rank}/{world.local_world_size} node {world.node_rank}/{world.nodes} sum {total.item():g}"
    )
    print(f"{line} {world.host}" if "--hosts" in sys.argv else line, flush=True)


if __name__ == "__main__":
    main()
