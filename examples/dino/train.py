"""Train a vision transformer without labels, as DINO and iBOT do. README.md explains it.

headway run --nproc 8 examples/dino/train.py --data shards
headway submit --nodes 4 --gpus-per-node 8 examples/dino/train.py --data $PWD/shards
headway run --nproc 2 examples/dino/train.py --data shards --tiny --batch 8 --epochs 2     # on a laptop
"""

import argparse
import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import headway as hw

STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
CENTER_MOMENTUM, TEACHER_MOMENTUM = 0.9, 0.996


class VisionTransformer(nn.Module):
    """A vision transformer with DINO's head, which the class token and the patches share."""

    def __init__(self, size, patch, width, depth, heads, out):
        super().__init__()
        self.side = size // patch
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, width, self.side, self.side) * 0.02)
        layer = {"activation": "gelu", "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **layer) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.last = nn.Linear(width, out, bias=False)

    def features(self, images, masks=None):
        """Returns what the head makes of the class token and of each patch: images x (1 + patches) x out."""
        grid = self.embed(images)
        positions = self.positions
        if grid.shape[-1] != self.side:
            positions = F.interpolate(positions, grid.shape[-2:], mode="bicubic", antialias=True)
        patches = grid.flatten(2).transpose(1, 2)
        if masks is not None:
            patches = torch.where(masks[..., None], self.mask_token.to(patches.dtype), patches)
        patches = patches + positions.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.last(F.normalize(self.head(self.norm(tokens)), dim=-1))

    def forward(self, large, masks=None, small=None):
        """Returns the classes of all crops, large ones first, and the patches of the large ones."""
        found = self.features(large, masks)
        classes = found[:, 0]
        if small is not None:
            classes = torch.cat([classes, self.features(small)[:, 0]])
        return classes, found[:, 1:]


class DinoLoss(nn.Module):
    """Cross entropy with what the teacher sees: in other crops of an image, and in patches that are masked."""

    def __init__(self, out):
        super().__init__()
        self.register_buffer("centers", torch.zeros(2, out))

    def forward(self, student, teacher, masks, n_large):
        classes, patches = (F.log_softmax(each.float() / STUDENT_TEMPERATURE, -1) for each in student)
        class_targets, patch_targets = (
            F.softmax((each.float() - center) / TEACHER_TEMPERATURE, -1)
            for each, center in zip(teacher, self.centers, strict=True)
        )
        targets = class_targets.chunk(n_large)
        views = classes.split(len(targets[0]))
        terms = [
            -(target * view).sum(-1).mean()
            for i, target in enumerate(targets)
            for j, view in enumerate(views)
            if i != j
        ]
        errors = -(patch_targets * patches).sum(-1)
        share = masks / masks.sum(-1, keepdim=True).clamp(min=1)  # each masked crop counts once
        self.move_centers(teacher)
        return torch.stack(terms).mean(), (errors * share).sum() / masks.any(-1).sum().clamp(min=1)

    @torch.no_grad()
    def move_centers(self, teacher):
        means = torch.stack([each.float().flatten(0, -2).mean(0) for each in teacher])
        if hw.world_size() > 1:
            torch.distributed.all_reduce(means)
        self.centers.lerp_(means / hw.world_size(), 1 - CENTER_MOMENTUM)


class Dino(hw.TrainValStage):
    def __init__(self, *, total, **settings):
        super().__init__(**settings)
        self.total = total

    def step(self, batch):
        large, small = batch.global_crops.flatten(0, 1), batch.local_crops.flatten(0, 1)
        masks = batch.masks.flatten(0, 1)
        with torch.no_grad():
            teacher = self.models["teacher"](large)
        student = self.models["student"](large, masks, small)
        dino, ibot = self.models["loss"](student, teacher, masks, n_large=len(batch.global_crops))
        self.log("dino", dino)
        self.log("ibot", ibot)
        return dino + ibot

    @torch.no_grad()
    def optimize(self):
        super().optimize()
        rise = (1 - math.cos(math.pi * min(1.0, self.steps_done / self.total))) / 2
        momentum = TEACHER_MOMENTUM + (1 - TEACHER_MOMENTUM) * rise
        teacher, student = (self.pipe.registered_models[name].bare for name in ("teacher", "student"))
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - momentum)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="a directory with curated/ and web/, of shards"
    )
    parser.add_argument(
        "--broaden-at", type=int, default=20_000, help="step from which half of the photos are web's"
    )
    parser.add_argument("--batch", type=int, default=1024, help="photos of all ranks together in a step")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tiny", action="store_true", help="a small network and small crops, for a laptop")
    options = parser.parse_args()
    pipe = hw.Pipeline(config=options, name="dino")
    hw.seed(0)

    size, patch, width, depth, heads, out = (
        (32, 8, 32, 2, 2, 64) if options.tiny else (224, 16, 384, 12, 6, 8192)
    )
    student = VisionTransformer(size, patch, width, depth, heads, out)
    pipe.register_model("student", student)
    pipe.register_model("teacher", copy.deepcopy(student).requires_grad_(False), parallel="none")
    pipe.register_model("loss", DinoLoss(out), parallel="none")

    mix = hw.data.Mix(
        {"curated": 0.9, "web": 0.1},
        shards={name: options.data / name for name in ("curated", "web")},
        schedule=[(options.broaden_at, {"curated": 0.5, "web": 0.5})],  # the curriculum
    )
    crops = hw.data.MultiCrop(
        global_size=size,
        local_size=16 if options.tiny else 96,
        n_local=2 if options.tiny else 8,
        output="fp32" if options.tiny else "bf16",
        then=(hw.data.BlockMasks(patch=patch),),
    )
    device = "cuda" if torch.cuda.is_available() else None  # decodes and crops there
    train = hw.data.ShardLoader(
        mix, global_batch_size=options.batch, transform=crops, tail="drop", device=device
    )
    pipe.register_dataset("train", train)
    total = options.epochs * len(train)
    pipe.register_optimizer(
        "adamw",
        lambda params: torch.optim.AdamW(params, lr=options.lr, weight_decay=0.04),
        scheduler=lambda adamw: hw.train.warmup_cosine(adamw, warmup=total // 10, total=total),
        model="student",
    )
    precision = "fp32" if options.tiny else "bf16"
    pipe.append_stage(Dino(total=total, precision=precision, gradient_clip=3.0), max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10min", keep_last=2)
    pipe.run()


if __name__ == "__main__":
    main()
