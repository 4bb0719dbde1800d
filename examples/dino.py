"""Train a vision transformer without labels, as DINO and iBOT do: many crops, masks, a teacher that follows.

    headway data pack imagenet/train shards                             # once: photos into shards
    headway run --nproc 8 examples/dino.py --data shards                # a process for each GPU of this machine
    headway submit --nodes 4 --gpus-per-node 8 examples/dino.py --data $PWD/shards
    headway run --smoke examples/dino.py --data shards --tiny           # does it work? on a laptop, in a minute

Crops and masks depend on seed, epoch and sample alone, and student, teacher, centers and optimizer are saved together,
so a run that was killed continues to the last bit; on another number of ranks, with the same crops.
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.train.model.schedules import warmup_cosine

STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
CENTER_MOMENTUM = 0.9


class VisionTransformer(nn.Module):
    """A vision transformer with DINO's head, which classes and patches share."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, out: int) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token, self.hidden = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.zeros(1, 1, width)),
        )
        self.places = nn.Parameter(torch.randn(1, width, self.side, self.side) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.last = nn.Linear(width, out, bias=False)

    def features(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        """Returns the outputs of the class token and of all patches: images x (1 + patches) x out."""
        embedded = self.embed(images)
        places = self.places
        if embedded.shape[-1] != self.side:
            places = F.interpolate(places, embedded.shape[-2:], mode="bicubic", antialias=True)
        patches = embedded.flatten(2).transpose(1, 2)
        if masks is not None:
            patches = torch.where(masks[..., None], self.hidden.to(patches.dtype), patches)
        tokens = torch.cat(
            [self.token.expand(len(images), -1, -1), patches + places.flatten(2).transpose(1, 2)], 1
        )
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.last(F.normalize(self.head(self.norm(tokens)), dim=-1))
        return out

    def forward(
        self, large: Tensor, masks: Tensor | None, small: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the classes of all crops, large ones first, and the patches of the large ones."""
        found = self.features(large, masks)
        classes = found[:, 0]
        if small is not None:
            classes = torch.cat([classes, self.features(small)[:, 0]])
        return classes, found[:, 1:]


class DinoLoss(nn.Module):
    """Cross entropy with what the teacher sees: of other crops of an image, and of patches that are hidden."""

    centers: Tensor

    def __init__(self, out: int) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(2, out))

    def forward(
        self,
        student: tuple[Tensor, Tensor],
        teacher: tuple[Tensor, Tensor],
        masks: Tensor,
        crops: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        classes, patches = (each.float() / STUDENT_TEMPERATURE for each in student)
        targets = [
            F.softmax((each.float() - center) / TEACHER_TEMPERATURE, -1)
            for each, center in zip(teacher, self.centers, strict=True)
        ]
        n_large, n_all = crops
        views, wanted = F.log_softmax(classes, -1).chunk(n_all), targets[0].chunk(n_large)
        terms = [
            -(target * view).sum(-1).mean()
            for i, target in enumerate(wanted)
            for j, view in enumerate(views)
            if i != j
        ]
        each = -(targets[1] * F.log_softmax(patches, -1)).sum(-1)
        share = masks / masks.sum(-1, keepdim=True).clamp(min=1)  # each masked crop counts once
        self.follow(teacher)
        return torch.stack(terms).mean(), (each * share).sum() / masks.any(-1).sum().clamp(min=1)

    @torch.no_grad()
    def follow(self, teacher: tuple[Tensor, Tensor]) -> None:
        """Moves the centers to the mean over all ranks."""
        means = torch.stack([each.float().flatten(0, -2).mean(0) for each in teacher])
        if hw.world_size() > 1:
            torch.distributed.all_reduce(means)
        self.centers.lerp_(means / hw.world_size(), 1 - CENTER_MOMENTUM)


class Dino(hw.TrainValStage):
    def __init__(self, *, momentum: float, total: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.momentum, self.total = momentum, total

    def step(self, batch: Any) -> Tensor:
        large, small = batch.global_crops, batch.local_crops
        masks = batch.masks.flatten(0, 1)
        with torch.no_grad():
            teacher = self.models["teacher"](large.flatten(0, 1), None)
        student = self.models["student"](large.flatten(0, 1), masks, small.flatten(0, 1))
        crops = len(large), len(large) + len(small)
        dino, ibot = self.models["loss"](student, teacher, masks, crops)
        self.log("dino", dino)
        self.log("ibot", ibot)
        total: Tensor = dino + ibot
        return total

    def optimize(self) -> None:
        super().optimize()
        models = self.pipe.registered_models
        rise = (1 - math.cos(math.pi * min(1.0, self.steps_done / self.total))) / 2
        follow(models["teacher"].bare, models["student"].bare, self.momentum + (1 - self.momentum) * rise)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Moves the teacher towards the student."""
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)


def make_pipeline(options: argparse.Namespace) -> hw.Pipeline:
    hw.init()
    hw.seed(0)
    size, local, patch, width, depth, heads, out = (
        (32, 16, 8, 32, 2, 2, 64) if options.tiny else (224, 96, 16, 384, 12, 6, 8192)
    )
    crops = hw.data.MultiCrop(
        global_size=size,
        local_size=local,
        n_local=2 if options.tiny else 8,
        output="fp32" if options.tiny else "bf16",
        then=(hw.data.BlockMasks(patch=patch),),
    )
    device = "cuda" if torch.cuda.is_available() else None
    train = hw.data.ShardLoader(
        options.data, global_batch_size=options.batch, transform=crops, tail="drop", device=device
    )
    total = options.epochs * max(1, len(train))

    pipe = hw.Pipeline(config=vars(options) | {"data": str(options.data)}, name="dino")
    student = VisionTransformer(size, patch, width, depth, heads, out)
    pipe.register_model("student", student)
    pipe.register_model("teacher", copy.deepcopy(student).requires_grad_(False), parallel="none")
    pipe.register_model("loss", DinoLoss(out), parallel="none")
    pipe.register_optimizer(
        "adamw",
        lambda parameters: torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.04),
        scheduler=lambda adamw: warmup_cosine(adamw, warmup=total // 10, total=total),
        model="student",
    )
    pipe.register_dataset("train", train)
    precision = "fp32" if options.tiny else "bf16"
    pipe.append_stage(
        Dino(momentum=0.996, total=total, precision=precision, gradient_clip=3.0), max_epochs=options.epochs
    )
    pipe.enable_checkpointing(every=options.save, keep_last=2)
    return pipe


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a directory of tar shards with photos")
    parser.add_argument("--batch", type=int, default=1024, help="photos of all ranks together in a step")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", default="10min", help="how often the run is saved")
    parser.add_argument("--tiny", action="store_true", help="a small network and small crops, for a laptop")
    return parser.parse_args(words)


if __name__ == "__main__":
    make_pipeline(parse()).run()
