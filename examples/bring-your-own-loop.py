"""Keep your own torch loop, and take only what you need: ranks, loader positions, checkpoints and the ledger.

    headway run --nproc 2 examples/bring-your-own-loop.py
    headway submit --nodes 2 --gpus-per-node 8 examples/bring-your-own-loop.py
    headway verify-resume --nproc 2 examples/bring-your-own-loop.py      # kill it, resume it, compare every step

What you get without a Pipeline: one script for every launcher, the cause when a rank fails, samples in an exact order
on any number of ranks, checkpoints that are whole or absent, a run directory that `headway runs` lists, and the proof
that a resume is exact. What stays yours: metrics, precision, accumulation, and saving when the job's time is up.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import headway as hw

STEPS, SAVE_EVERY = 60, 20


def main():
    world = hw.init()  # torchrun, srun, mpirun, headway, or nothing
    hw.seed(0)
    x = torch.randn(4096, 16)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    train = hw.data.DataLoader(data, global_batch_size=64, shuffle=True)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(world.device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    model = nn.parallel.DistributedDataParallel(net) if world.world_size > 1 else net

    run = hw.dist.open_run("runs", name="own-loop", resume="auto")
    with hw.record.recording(run, world) as attempt, hw.train.Ledger(attempt) as ledger:
        step = 0
        saved = hw.checkpoint.load_latest(run, {"net": net.state_dict(), "adam": {}, "train": {}})
        if saved is not None:  # net is filled in place
            adam.load_state_dict(saved.state["adam"])
            train.load_state_dict(saved.state["train"])
            step = saved.step
            if saved.world_size == world.world_size:  # else training continues with other random numbers
                hw.train.restore_random_state(saved.local, world.device)
        while step < STEPS:
            for inputs, targets in train:
                loss = F.mse_loss(model(inputs.to(world.device)), targets.to(world.device))
                adam.zero_grad()
                loss.backward()
                adam.step()
                step += 1
                ledger.add(step, loss, train, weight=len(inputs))
                if step % SAVE_EVERY == 0:
                    hw.print_root(f"step {step}: loss {loss.item():.3f}")
                    ledger.write()
                    state = {"net": net.state_dict(), "adam": adam.state_dict(), "train": train.state_dict()}
                    random = hw.train.random_state(
                        world.device
                    )  # dropout continues as if nothing had happened
                    hw.checkpoint.save(run, state, step=step, local=random, lock=attempt.lock)
                if step == STEPS:
                    break


if __name__ == "__main__":
    main()
