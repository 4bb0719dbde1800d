"""The smallest run: join, do something together, and leave a run directory that explains itself.

python examples/hello.py
headway run --nproc 2 examples/hello.py
srun -N2 -n4 python examples/hello.py
mpirun -n 4 python examples/hello.py
"""

import torch
import torch.distributed

import headway as hw


def main() -> None:
    world = hw.init()
    hw.seed(0)
    config = {"size": 1000, "steps": 3}
    run = hw.dist.open_run("runs", name="hello", config=config)
    with hw.record.recording(run, world, config=config):
        for step in range(1, config["steps"] + 1):
            hw.dist.set_phase("hello", step)
            mine = torch.full((config["size"],), float(world.rank + 1), device=world.device)
            torch.distributed.all_reduce(mine)
            hw.print_root(f"step {step}: the ranks' numbers add up to {mine[0].item():g}")
    hw.print_root(f"done; look around in {run.path}")


if __name__ == "__main__":
    main()
