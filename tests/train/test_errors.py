"""Bad input: one sentence that names the thing and the remedy, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import FEATURES, Batches, Classify, make_net, make_pipe, sgd
from waiting import check_duration

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Fsdp, Pipeline, TrainValStage


class NoLoss(Classify):
    def step(self, batch: Any) -> Any:
        super().step(batch)


class Three(Classify):
    def val_step(self, batch: Any) -> Any:
        loss = super().step(batch)
        return loss, len(batch[0]), loss


class Vector(Classify):
    def step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.models["net"](batch[0]), batch[1], reduction="none")


class Detached(Classify):
    def step(self, batch: Any) -> Tensor:
        return super().step(batch).detach()


class Median(Classify):
    def step(self, batch: Any) -> Tensor:
        self.log("loss2", 1.0, reduce="median")  # type: ignore[arg-type]
        return super().step(batch)


class NoStep(TrainValStage):
    pass


def with_stage(stage: TrainValStage, loader: Any = None, *, epochs: int = 1) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        pipe = make_pipe(folder)
        pipe.register_dataset("train", Batches(3) if loader is None else loader)
        pipe.register_dataset("val", Batches(1))
        pipe.append_stage(stage, max_epochs=epochs)
        pipe.run()

    return run


def no_dataset(folder: Path) -> None:
    pipe = make_pipe(folder)
    pipe.register_dataset("test", Batches(1))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()


def different_lengths(folder: Path) -> None:
    with_stage(Classify(), Batches(3 + hw.rank()))(folder)


def unshuffled_remainder(folder: Path) -> None:
    dataset = torch.utils.data.TensorDataset(torch.rand(5, FEATURES), torch.zeros(5, dtype=torch.int64))
    with_stage(Classify(), hw.data.DataLoader(dataset, batch_size=2))(folder)


def strange_optimizer(folder: Path) -> None:
    pipe = Pipeline(root=folder)
    pipe.register_model("net", make_net())
    pipe.register_optimizer("adam", torch.optim.Adam(make_net().parameters()))
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()


def two_optimizers(folder: Path) -> None:
    pipe = make_pipe(folder)
    pipe.register_optimizer("second", sgd)
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()


def run_twice(folder: Path) -> None:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.run()
    assert len(list(folder.glob("*/run.json"))) == 1
    pipe.run()


def plateau(folder: Path) -> None:
    pipe = make_pipe(folder)
    pipe.register_optimizer("b", sgd, scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o))


WRONG_DEVICE = [(torch.zeros(4, 10, device="meta"), torch.zeros(4, dtype=torch.long))]


def append_again(folder: Path) -> None:
    stage = Classify()
    make_pipe(folder).append_stage(stage, max_epochs=1)
    make_pipe(folder).append_stage(stage, max_epochs=1)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no train dataset": (
        no_dataset,
        (
            "stage 'classify' needs the dataset 'train'; registered: 'test'. Call "
            "pipe.register_dataset('train', loader) before run(), or in pre_run"
        ),
    ),
    "used up": (
        with_stage(Classify(), iter(list(Batches(3))), epochs=2),
        (
            "stage 'classify' got no batch in epoch 2: register a dataset that is not empty and can be iterated over "
            "again"
        ),
    ),
    "different lengths": (
        different_lengths,
        (
            "stage 'classify' has different numbers of training batches: 3 on rank 0, 4 on rank 1; use "
            'hw.data.DataLoader, drop_last=True, limit_train_batches, or uneven="shortest"'
        ),
    ),
    "a remainder without shuffle": (
        unshuffled_remainder,
        (
            "stage 'classify' has different numbers of training batches: 1 on rank 0, 2 on rank 1; use shuffle=True, "
            'drop_last=True, limit_train_batches, or uneven="shortest"'
        ),
    ),
    "no loss": (
        with_stage(NoLoss()),
        "train_step of stage 'noloss' returned NoneType instead of a loss: return the tensor to call backward() on",
    ),
    "loss not a scalar": (
        with_stage(Vector()),
        "train_step of stage 'vector' returned a loss of shape (16,): return one number, such as loss.mean()",
    ),
    "three values": (
        with_stage(Three()),
        "stage 'three' returned (Tensor, int, Tensor) instead of a loss: return the loss, or (loss, weight)",
    ),
    "loss without gradient": (
        with_stage(Detached()),
        (
            "train_step of stage 'detached' returned a loss that depends on no parameter: do not detach it, and let "
            "the model's parameters require gradients"
        ),
    ),
    "unknown reduction": (
        with_stage(Median()),
        'metric \'train/loss2\': reduce=\'median\' is unknown: use one of "mean", "sum", "min", "max", "last"',
    ),
    "wrong device": (
        with_stage(Classify(), WRONG_DEVICE),
        "a batch has a tensor on meta, but this rank uses cpu: return tensors on the CPU or on cpu from the loader",
    ),
    "strange optimizer": (
        strange_optimizer,
        (
            "optimizer 'adam' has parameters that no registered model has: register their model, or pass a function "
            "that makes the optimizer from the parameters it gets"
        ),
    ),
    "two optimizers": (
        two_optimizers,
        (
            "stage 'classify' cannot choose an optimizer; registered: 'sgd', 'second'. Register one, or override "
            "optimizers() to return those of this stage"
        ),
    ),
    "two models of one name": (
        lambda folder: make_pipe(folder).register_model("net", make_net()),
        "a model named 'net' is already registered: choose another name",
    ),
    "no step": (
        with_stage(NoStep()),
        "stage 'nostep' has no step: define step(self, batch) that returns the loss",
    ),
    "no end": (
        lambda folder: make_pipe(folder).append_stage(Classify()),
        "stage 'classify' would never end: give max_epochs or max_steps",
    ),
    "a class": (
        lambda folder: make_pipe(folder).append_stage(Classify, max_epochs=1),  # type: ignore[arg-type]
        "append_stage got the class Classify: pass an instance, Classify()",
    ),
    "run twice": (
        run_twice,
        "this pipeline has already run: create a new Pipeline for each run",
    ),
    "no stage": (
        lambda folder: make_pipe(folder).run(),
        "the pipeline has no stage: call pipe.append_stage(stage, max_epochs=...) before run()",
    ),
    "plateau without metric": (
        plateau,
        "the scheduler of optimizer 'b' needs a metric: pass its name, such as monitor='val/loss'",
    ),
    "unknown model": (
        lambda folder: make_pipe(folder).register_optimizer("b", sgd, model="nett"),
        "optimizer 'b' needs model 'nett'; registered: 'net'. Register the model first",
    ),
    "unknown parallel": (
        lambda folder: make_pipe(folder, parallel="dp"),
        'model \'net\': parallel=\'dp\' is unknown: use "ddp", "fsdp", "none", Ddp(), Fsdp() or Tp()',
    ),
    "blocks that are not there": (
        lambda folder: make_pipe(folder, parallel=Fsdp(blocks=(nn.Conv2d,))),
        "model 'net': Fsdp(blocks=...) names Conv2d, but the model consists of BatchNorm1d, Dropout, Linear, Net",
    ),
    "ema": (
        lambda folder: make_pipe(folder, ema=1.0),
        "ema=1.0 is not a valid decay: give a number between 0 and 1, such as 0.999",
    ),
    "no epoch": (
        lambda folder: make_pipe(folder).append_stage(Classify(), max_epochs=-1, name="none"),
        "max_epochs=-1: give a whole number of at least 1",
    ),
    "half a step": (
        lambda folder: make_pipe(folder).append_stage(Classify(), max_steps=1.5, name="none"),  # type: ignore[arg-type]
        "max_steps=1.5: give a whole number of at least 1",
    ),
    "a stage of another pipeline": (
        append_again,
        "stage 'classify' is part of a pipeline already: append a new one",
    ),
    "not a loader": (
        lambda folder: make_pipe(folder).register_dataset("train", 5),  # type: ignore[arg-type]
        "dataset 'train' is of type int: register an iterable over batches, such as a DataLoader",
    ),
}


@pytest.mark.alone
@ranks(2)
def test_bad_input_is_reported_within_five_seconds(tmp_path: Path) -> None:
    """One case, which the ranks must find out together; the others may take longer, beside other tests."""
    check_refusal("different lengths", tmp_path, limit_s=5)


@ranks(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_on_all_ranks(case: str, tmp_path: Path) -> None:
    check_refusal(case, tmp_path, limit_s=20)


def check_refusal(case: str, folder: Path, limit_s: float) -> None:
    torch.optim.SGD(
        [torch.zeros(1)], lr=0.1
    )  # the first optimizer of a process makes torch import for seconds
    hw.barrier()
    cause, message = BAD[case]
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        cause(folder)
    check_duration(time.monotonic() - began, limit_s, "the mistake is reported")
    assert str(caught.value) == message
    hw.barrier()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, 'precision=\'fp8\' is unknown: use one of "fp32", "tf32", "bf16", "fp16"'),
        (
            {"acumulate": 4},
            "'acumulate' is not a valid setting of Classify (did you mean 'accumulate'?); valid: precision, accumulate",
        ),
        ({"accumulate": 0}, "accumulate=0: give a whole number of at least 1"),
        ({"gradient_clip": 0.0}, "gradient_clip=0.0: give a norm above 0, or None for no clipping"),
        ({"val_every": "often"}, "val_every='often' is not a valid interval: give"),
        (
            {"val_every": 500},
            'val_every=500 could mean steps or epochs: give "500 steps" or "500 epochs", a part',
        ),
        ({"val_every": 0}, 'val_every=0 is not a valid interval: give "500 steps", "2 epochs", "30min"'),
        ({"val_every": "500"}, "val_every='500' is not a valid interval: give \"500 steps\""),
        ({"on_nan": "pray"}, 'on_nan=\'pray\' is unknown: use "stop" or "skip"'),
    ],
)
def test_bad_settings_are_refused_when_the_stage_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Classify(**settings)
    assert str(caught.value).startswith(message)
