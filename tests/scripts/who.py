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
    # one write: print's newline comes separately when Python runs unbuffered, and ranks share the terminal
    sys.stdout.write(f"{line} {world.host}\n" if "--hosts" in sys.argv else f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
