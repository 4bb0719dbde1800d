"""Erasing, Mixup and CutMix on batches, and functions of the user in their place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.data import Batch, CutMix, Mixup, RandomChoice, RandomErasing, RandomResizedCrop
from headway.data.images.batch import finish_batch
from headway.errors import UsageError

KEYS = np.arange(1, 401, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def batch(count: int = 4, size: int = 20) -> Batch:
    images = torch.arange(1.0, count + 1)[:, None, None, None].expand(count, 3, size, size).clone()
    return Batch({"samples": torch.zeros(count, 4), "images": images, "cls": torch.arange(count) % 5})


def test_mixup_blends_images_and_labels_by_the_same_share() -> None:
    shares = []
    for start in range(0, 400, 4):
        mixed = Mixup(classes=5, alpha=0.4)(batch(), KEYS[start : start + 4])
        share = float(mixed.labels[1, 1])
        assert torch.allclose(mixed.labels[1], share * torch.eye(5)[1] + (1 - share) * torch.eye(5)[0])
        assert torch.allclose(mixed.images[1], torch.full((3, 20, 20), 2 * share + 1 * (1 - share)))
        assert torch.allclose(mixed.images[0], torch.full((3, 20, 20), 1 * share + 4 * (1 - share)))
        shares.append(share)
    assert abs(np.mean(shares) - 0.5) < 0.12 and np.var(shares) == pytest.approx(0.25 / 1.8, abs=0.05)
    again = Mixup(classes=5, alpha=0.4)(batch(), KEYS[:4])
    assert float(again.labels[1, 1]) == shares[0], "the same samples, the same share"


def test_cutmix_labels_are_the_shares_of_the_pixels() -> None:
    shares = []
    for start in range(0, 400, 4):
        mixed = CutMix(classes=5)(batch(), KEYS[start : start + 4])
        own = float((mixed.images[1, 0] == 2).float().mean())
        assert ((mixed.images[1] == 2) | (mixed.images[1] == 1)).all()
        assert mixed.labels[1].tolist() == pytest.approx([1 - own, own, 0, 0, 0])
        changed = mixed.images[1, 0] == 1
        rows, columns = changed.any(1), changed.any(0)
        assert torch.equal(changed, rows[:, None] & columns[None, :]), "a box"
        shares.append(float(own))
    assert min(shares) < 0.3 and max(shares) > 0.9


def test_erasing_takes_boxes_out_of_some_images() -> None:
    erased = RandomErasing(probability=0.25)(batch(400, 30), KEYS).images[:, 0] == 0
    parts = erased.float().mean((1, 2))
    some = parts > 0
    assert abs(float(some.float().mean()) - 0.25) < 0.07
    assert parts[some].min() > 0.01 and parts.max() < 0.36
    for image in erased[some]:
        assert torch.equal(image, image.any(1)[:, None] & image.any(0)[None, :])
    few = RandomErasing(probability=0.25)(batch(3, 30), KEYS[10:13]).images[:, 0] == 0
    assert torch.equal(few, erased[10:13]), "an image's box does not depend on the others"


def test_transforms_of_batches_run_in_order_and_may_be_functions() -> None:
    def double(given: Batch, keys: np.ndarray) -> Batch:
        assert len(keys) == 4
        given["images"] = given.images * 2
        return given

    transform = RandomResizedCrop(then=(double, double, RandomChoice((Mixup(classes=5),))))
    found = finish_batch(batch(), transform, KEYS[:4])
    assert found.images.mean() == pytest.approx(4 * 2.5) and found.labels.shape == (4, 5)
    chosen = RandomChoice((lambda given, _: given | {"which": 0}, lambda given, _: given | {"which": 1}))
    counts = [chosen(batch(), KEYS[at : at + 4])["which"] for at in range(0, 400, 4)]
    assert 30 < sum(counts) < 70
    with pytest.raises(UsageError, match="classes=0"):
        Mixup(classes=0)
    for mix in (Mixup(classes=3), CutMix(classes=3)):
        with pytest.raises(UsageError, match="labels from 0 to 3, and classes=3 allows 0 to 2"):
            mix(batch(), KEYS[:4])
    with pytest.raises(UsageError, match='Mixup cannot blend images of output="uint8"'):
        Mixup(classes=5)(Batch(batch() | {"images": batch().images.to(torch.uint8)}), KEYS[:4])


@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_in_fp8_are_mixed_and_erased_as_others(channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(8, 3, 12, 12).mul_(100).to(torch.float8_e4m3fn).contiguous(memory_format=layout)
    for step in (Mixup(classes=5), CutMix(classes=5), RandomErasing(probability=0.9)):
        found, expected = (
            step(Batch({"images": each.clone(), "cls": torch.arange(8) % 5}), KEYS[:8])
            for each in (images, images.float())
        )
        assert found.images.dtype == torch.float8_e4m3fn
        assert torch.equal(found.images.float(), expected.images.to(torch.float8_e4m3fn).float()), step
        assert torch.equal(found.labels, expected.labels)


def test_settings_of_erasing_are_refused_by_their_names() -> None:
    for setting in ({"probability": 2}, {"probability": "x"}, {"scale": (0.5, 0.1)}, {"ratio": (0, 1)}):
        (name,) = setting
        with pytest.raises(UsageError, match=f"^{name}="):
            RandomErasing(**setting)
