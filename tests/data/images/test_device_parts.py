"""The parts of the GPU's path that need no GPU: what is read for it, where images are, and how many queues it has."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from numpy.lib.stride_tricks import as_strided

from headway.data import RandomResizedCrop, ShardLoader, pack
from headway.data.images.batch import IMAGE, EncodedImage
from headway.data.images.device.image_table import ImageTable
from headway.data.images.device.pinned import PinnedMemory
from headway.data.images.exif import turn
from headway.data.shards.decode import plain_jpeg_size
from headway.data.shards.shard import Shard
from headway.data.shards.tar import ShardLimits
from headway.dist.device import QUEUES, use_many_queues
from headway.errors import BadShard


def test_a_jpeg_with_two_frames_is_left_to_the_cpu() -> None:
    """nvJPEG writes as many pixels as the frame says that it believes, into memory for the one that we believe."""
    plain = simplejpeg.encode_jpeg(np.zeros((16, 24, 3), np.uint8))
    assert plain_jpeg_size(memoryview(plain), ShardLimits()) == (16, 24)
    frame = plain.index(b"\xff\xc0")
    length = 2 + int.from_bytes(plain[frame + 2 : frame + 4], "big")
    large = plain[frame : frame + 5] + (4000).to_bytes(2, "big") * 2 + plain[frame + 9 : frame + length]
    for twice in (
        plain[:frame] + large + plain[frame:],
        plain[: frame + length] + large + plain[frame + length :],
    ):
        assert plain_jpeg_size(memoryview(twice), ShardLimits()) is None


def test_turned_images_are_read_in_the_order_of_exif() -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    table = ImageTable.of([image] * 8).turned(np.arange(1, 9))
    for how, row, (height, width) in zip(range(1, 9), table.rows.tolist(), table.sizes.tolist(), strict=True):
        address, by_channel, by_row, by_column = row
        first = pixels.reshape(-1)[address - image.data_ptr() :]
        seen = as_strided(first, (height, width, 3), (by_row, by_column, by_channel))
        assert np.array_equal(seen, turn(pixels, how)), how


def test_images_of_several_blocks_are_one_table() -> None:
    tables = [ImageTable.of([torch.zeros(3, size, 2, dtype=torch.uint8)] * 2) for size in (4, 5)]
    assert ImageTable.select(tables, np.array([3, 0, 2])).sizes[:, 0].tolist() == [5, 4, 5]


def test_a_sample_is_read_into_given_memory_and_a_truncated_shard_is_named(tmp_path: Path) -> None:
    samples = ({"__key__": f"{n}", "cls": n, "bin": bytes([n]) * 3000} for n in range(6))
    pack(samples, tmp_path, shard_size=2**20)
    path = next(tmp_path.glob("*.tar"))
    shard, memory = Shard.open(path), PinnedMemory()
    assert [shard.read(n, memory.allocate) for n in range(6)] == [shard.read(n) for n in range(6)]
    os.truncate(path, 2 * 512 + 100)
    with pytest.raises(BadShard, match="truncated or rewritten while in use"):
        shard.read(5, memory.allocate)


def test_hardware_queues_are_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    name, number = QUEUES.split("=")
    monkeypatch.setenv(name, "")  # so that it is as before afterwards
    monkeypatch.delenv(name)
    assert use_many_queues() and os.environ[name] == number == "32"
    monkeypatch.setenv(name, "1")  # as Megatron's tensor parallelism asks for
    assert not use_many_queues() and os.environ[name] == "1"
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not use_many_queues() and name not in os.environ, "too late"


def test_an_image_that_the_gpu_refuses_is_decoded_here_or_replaced_or_left_out(tmp_path: Path) -> None:
    pixels = [np.full((16, 24, 3), 30 * number, np.uint8) for number in range(8)]
    encoded = [simplejpeg.encode_jpeg(each, quality=95) for each in pixels]
    at = encoded[3].index(b"\xff\xdb")
    size = 2 + int.from_bytes(encoded[3][at + 2 : at + 4], "big")
    encoded[3] = encoded[3][:at] + encoded[3][at + size :]  # its header is fine, but no decoder can decode it
    pack(({"__key__": str(number), "jpg": data} for number, data in enumerate(encoded)), tmp_path)
    for replaces in (True, False):
        transform = RandomResizedCrop(8)
        loader = ShardLoader(tmp_path, batch_size=8, shuffle=replaces, threads=1, transform=transform)
        reader = loader._reader
        reader._gpu_bytes, reader._begin, reader._cropper = 1, reader._begin_for_gpu, None  # as with a GPU
        chunk = reader.read([(0, 0, 0, number) for number in range(8)])
        assert all(isinstance(value[IMAGE], EncodedImage) for value in chunk.values) and not chunk.bad
        for number in (5, 3):  # the last first, as when a batch is made
            reader.decode_on_cpu(chunk, number)
        assert [sample.key for sample in chunk.bad] == ["3"]
        names = [value["__key__"] for value in chunk.values]
        assert len(names) == (8 if replaces else 7) and names[:3] == ["0", "1", "2"] and "3" not in names
        assert chunk.substitutes == ({3} if replaces else set())
        decoded = {
            value["__key__"]: value[IMAGE] for value in chunk.values if type(value[IMAGE]) is np.ndarray
        }
        assert decoded.keys() == ({"5", names[3]} if replaces else {"5"})
        for name, found in decoded.items():
            assert np.abs(found.astype(int) - pixels[int(name)]).max() <= 2
