"""What is saved for the first time is read back and compared, before the checkpoint is complete."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waiting import wait_until

import headway as hw
from headway import checkpoint
from headway.checkpoint import Saver
from headway.errors import StorageError, UsageError
from headway.testing import faults, ranks


def nothing_is_left(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


class Rounds(Tensor):
    """A type of tensor that copies other values than it has."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.cpu):
            args = tuple(each.round() if isinstance(each, Rounds) else each for each in args)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def odd() -> Tensor:
    made: Tensor = torch.Tensor._make_subclass(Rounds, torch.full((3,), 0.3))
    return made


@pytest.mark.parametrize("background", [False, True])
def test_a_tensor_that_is_written_otherwise_than_given_is_named(background: bool, tmp_path: Path) -> None:
    with Saver(tmp_path, background=background) as saver:
        with pytest.raises(UsageError, match=r"'net\.odd' differs when it is read back from a checkpoint"):
            saver.save({"net": {"fine": torch.ones(2), "odd": odd()}}, step=1)
            saver.wait()
        assert nothing_is_left(tmp_path)


def test_a_tensor_is_read_back_when_it_is_new_and_only_then(tmp_path: Path) -> None:
    """An optimizer creates its state after the first save."""
    net, momentum = torch.ones(2), torch.zeros(2)
    with Saver(tmp_path, background=False) as saver:
        saver.save({"net": {"w": net}}, step=1)
        state = {"net": {"w": net}, "sgd": {"w": momentum}}
        saver.save(state, step=2, before_write=lambda: net.add_(1))
        with pytest.raises(UsageError, match=r"'late\.w' differs"):
            saver.save(state | {"late": {"w": net}}, step=3, before_write=lambda: net.add_(1))
        saver.save(state | {"late": {"w": net}}, step=3)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:012d}" for n in (1, 2, 3)]


@ranks(2)
def test_one_rank_names_its_tensor_on_all(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
    own = torch.full((3,), float(hw.rank()))
    state = {"net": {"w": sharded}, f"rank-{hw.rank()}": {"own": own}}

    def change() -> None:
        if hw.rank() == 1:
            own.add_(1)

    with Saver(tmp_path, background=False) as saver:
        with pytest.raises(UsageError, match=r"'rank-1\.own' differs when it is read back"):
            saver.save(state, step=1, before_write=change)
        hw.barrier()
        assert nothing_is_left(tmp_path)
        saver.save(state, step=1)
    loaded = checkpoint.load(tmp_path / "step-000000000001").state
    assert torch.equal(loaded["net"]["w"], torch.arange(10.0).reshape(5, 2))


def test_bytes_that_the_storage_changes_are_its_fault(tmp_path: Path) -> None:
    def damage() -> None:
        (file,) = wait_until(lambda: list(tmp_path.glob(".tmp-*/rank-00000.safetensors")), "it is written")
        wait_until(lambda: file.stat().st_size > 1 << 20, "it is whole")
        with file.open("r+b") as opened:
            opened.seek(-100, 2)
            opened.write(b"\x01")

    thread = threading.Thread(target=damage)
    with Saver(tmp_path) as saver:
        with faults.at("checkpoint.rank_written", action="sleep=2"):
            thread.start()
            saver.save({"x": torch.zeros(1 << 19)}, step=1)
            with pytest.raises(
                StorageError, match=r"rank-00000\.safetensors .* has other bytes when it is read"
            ):
                saver.wait()
        thread.join()
        saver.save({"x": torch.zeros(1 << 19)}, step=1)
    assert len(list(tmp_path.glob("step-*"))) == 1
