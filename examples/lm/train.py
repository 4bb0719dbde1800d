"""Train a GPT on a file of tokens: sharded by FSDP2, and compared with its plan. README.md explains it.

headway run --nproc 8 examples/lm/train.py tokens.bin --plan plan.json
headway submit --nodes 2 --gpus-per-node 8 examples/lm/train.py $PWD/tokens.bin --plan $PWD/plan.json
headway run --nproc 2 examples/lm/train.py tokens.bin --model examples/lm/tiny.yaml --steps 20     # on a laptop
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from prepare import END
from torch import nn

import headway as hw

IGNORED = -100  # a label that is not to be learned


class Windows(torch.utils.data.Dataset):
    """A file of tokens, cut into samples. It is mapped: the ranks of a node share one copy in memory."""

    def __init__(self, path, length):
        self.tokens, self.length = np.memmap(path, dtype=np.uint16, mode="r"), length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number):
        start = number * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        inputs, labels = window[:-1], window[1:].clone()
        labels[inputs == END] = IGNORED  # how the next document begins cannot be known
        return inputs, labels


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocab, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)  # the embedding is the head, too


class LanguageModel(hw.TrainValStage):
    def step(self, batch):
        inputs, labels = batch
        logits = self.models["gpt"](inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss, (labels != IGNORED).sum()  # the mean, and over how many tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="what prepare.py has written")
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("gpt.yaml"), help="plan file")
    parser.add_argument("--plan", type=Path, help="what `headway plan FILE --save plan.json` has written")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=6e-4)
    options = parser.parse_args()
    settings = yaml.safe_load(options.model.read_text())
    layout = settings["layout"]

    pipe = hw.Pipeline(config=settings | {"steps": options.steps, "lr": options.lr}, name="lm")
    hw.seed(0)
    gpt = Gpt(**settings["model"])
    pipe.register_model(
        "gpt", gpt, parallel=hw.train.Fsdp(blocks=(Block,)), activation_checkpointing=(Block,)
    )
    pipe.register_optimizer(
        "adamw",
        lambda params: torch.optim.AdamW(params, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1),
        scheduler=lambda adamw: hw.train.warmup_cosine(
            adamw, warmup=options.steps // 20, total=options.steps
        ),
        model="gpt",
    )
    train, val = hw.data.split(Windows(options.tokens, layout["sequence"]), 0.02, seed=0)
    pipe.register_dataset(
        "train", hw.data.DataLoader(train, layout["microbatch"], shuffle=True, drop_last=True)
    )
    pipe.register_dataset("val", hw.data.DataLoader(val, layout["microbatch"]))
    at_once = layout["microbatch"] * hw.world_size()
    accumulate, rest = divmod(layout["global_batch"], at_once)
    if rest:
        parser.error(
            f"global_batch {layout['global_batch']} of {options.model} is no multiple of {at_once}: microbatch "
            f"{layout['microbatch']} on {hw.world_size()} ranks"
        )
    stage = LanguageModel(precision="bf16", accumulate=accumulate, gradient_clip=1.0, log_every=10)
    pipe.append_stage(stage, max_steps=options.steps)
    pipe.enable_checkpointing(every="10min", keep_last=2)
    if options.plan:
        pipe.enable_plan(options.plan)
    pipe.run()


if __name__ == "__main__":
    main()
