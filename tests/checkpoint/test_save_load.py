"""A state goes into a checkpoint and comes out equal to the last bit, on any number of ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checker import judge
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import headway
from headway import checkpoint, dist
from headway.checkpoint import api
from headway.checkpoint.format.manifest import TensorEntry
from headway.checkpoint.weights import loading
from headway.checkpoint.write import disk
from headway.errors import NoValidCheckpoint, RunLocked, StorageError, UsageError
from headway.run import Run
from headway.system.environment import FAILPOINT
from headway.testing import faults, ranks

STATE: dict[str, Any] = {
    "net": {
        "weight": torch.arange(12.0).reshape(4, 3),
        "layer.bias": torch.tensor([1.5, -0.0, float("nan")]),
    },
    "kinds": [
        torch.arange(4, dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.bfloat16, torch.float64)
    ],
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "half": torch.arange(5.0).to(torch.float8_e5m2),
    "plain": {
        "epoch": 3,
        "name": "a\u00e9\n",
        "none": None,
        "ok": True,
        "lr": 0.1 + 0.2,
        "big": 2**80,
        "list": [1, [2]],
    },
    "odd": {
        "tuple": (1, (2,)),
        "nan": float("inf"),
        "ints": {0: "a", 7: {"$x": 1}},
        "counter": Counter([5, 5, 9]),
    },
}


def assert_equal(one: Any, two: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype and one.shape == two.shape
        raw = [t.contiguous().resolve_conj().view(-1).view(torch.uint8) for t in (one, two)]
        assert torch.equal(*raw)
    elif isinstance(one, dict):
        assert type(one) is type(two) and list(one) == list(two)
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(two) and len(one) == len(two)
        for mine, other in zip(one, two, strict=True):
            assert_equal(mine, other)
    else:
        assert (type(one), one) == (type(two), two)


def test_directories_above_a_checkpoint_are_made(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "out" / "ckpt", STATE, step=7)
    assert checkpoint.verify(path) == [] and path.parent == tmp_path / "out" / "ckpt"


def test_what_is_there_for_people_fails_no_save(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    path = checkpoint.save(tmp_path, STATE, step=7)
    assert checkpoint.verify(path) == [] and checkpoint.load_latest(tmp_path).path == path  # type: ignore[union-attr]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", path.name]


def test_every_kind_of_value_returns_to_the_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, STATE, step=7, local={"rng": "00ff"}, metrics={"val/loss": 0.25})
    assert checkpoint.verify(path) == []
    loaded = checkpoint.load(path)
    assert_equal(STATE, loaded.state)
    assert (loaded.step, loaded.world_size, loaded.local) == (7, 1, {"rng": "00ff"})
    assert loaded.metrics == {"val/loss": 0.25}
    assert (tmp_path / "latest").read_text() == "step-000000000007\n"
    assert set(load_file(path / "rank-00000.safetensors")) >= {"net.weight", "net.layer.bias", "flag"}


def test_the_independent_judge_agrees(tmp_path: Path) -> None:
    simple = {"net": STATE["net"], "epoch": 3}
    checkpoint.save(tmp_path, simple, step=1)
    whole, problems = judge(str(tmp_path))
    assert problems == [] and list(whole) == [1]
    assert whole[1]["tensors"]["net.weight"][2][0][2] == STATE["net"]["weight"].numpy().tobytes().hex()
    assert whole[1]["state"]["epoch"] == 3


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = checkpoint.save(tmp_path / "new", {"x": torch.ones(1)}, step=0)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o600}


def test_training_state_round_trip_in_place_and_anew(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Linear(3, 4)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    torch.manual_seed(0)
    net, adamw = make()
    net(torch.ones(2, 3)).sum().backward()
    adamw.step()
    path = checkpoint.save(
        tmp_path, {"net": net.state_dict(), "adamw": adamw.state_dict(), "epoch": 1}, step=1
    )
    fresh, fresh_adamw = make()
    loaded = checkpoint.load(path, {"net": fresh.state_dict(), "adamw": {}})
    assert list(loaded.state) == ["net", "adamw"]
    assert_equal(dict(net.state_dict()), dict(fresh.state_dict()))  # in place
    fresh_adamw.load_state_dict(loaded.state["adamw"])
    assert_equal(adamw.state_dict(), fresh_adamw.state_dict())


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": object()}}, "'a.b' is a builtins.object"),
        ({"a": [torch.tensor([1.0]).numpy()]}, "'a.0' is a numpy.ndarray"),
        ({"a": {"b": torch.tensor(1.0).numpy()[()]}}, "'a.b' is a numpy.float32"),
        ({"a": b"bytes"}, "'a' is a builtins.bytes"),
        ({"a": {1.5: 2}}, "'a' has the key 1.5"),
        ({"a": {"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}}, "the same name 'a.b.c'"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is a torch.sparse_coo .* convert it to a dense tensor"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "of torch.complex128, .* convert it to another type"),
        ({"a": torch.empty(2, device="meta")}, "'a' is a meta tensor"),
        ({3: 1}, "parts of a state"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, state: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        checkpoint.save(tmp_path, state, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 10**18, True, "3", 1.0])
def test_bad_steps_are_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="integer of at least 0"):
        checkpoint.save(tmp_path, {}, step=step)


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"call \.item"):
        checkpoint.save(tmp_path, {}, step=1, metrics={"loss": torch.tensor(1.0)})  # type: ignore[dict-item]
    path = checkpoint.save(tmp_path, {}, step=1, metrics={"loss": float("nan"), "accuracy": 1})
    assert checkpoint.load(path).metrics == {"accuracy": 1}


def test_an_empty_state_is_a_state(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, {}, step=0)
    assert checkpoint.verify(path) == [] and checkpoint.load(path).state == {}


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, {"x": torch.zeros(1)}, step=1)
    with pytest.raises(UsageError, match="never overwritten"):
        checkpoint.save(tmp_path, {"x": torch.ones(1)}, step=1)
    assert checkpoint.load(path).state["x"].item() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000000000001"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"net": {"weight": torch.zeros(3, 4)}}, r"\[4, 3\] and is now .* \[3, 4\]"),
        ({"net": {"weight": torch.zeros(4, 3, dtype=torch.float64)}}, "torch.float64"),
        ({"net": {"other": torch.zeros(1)}}, "no tensor 'net.other'"),
        ({"net": {"weight": torch.empty(4, 3, device="meta")}}, "'net.weight' is a meta tensor"),
        ({"model": {}}, "no part 'model'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    path = checkpoint.save(tmp_path, {"net": STATE["net"]}, step=1)
    with pytest.raises(UsageError, match=said):
        checkpoint.load(path, state)
    tensors = [tensor for part in state.values() for tensor in part.values() if not tensor.is_meta]
    assert not any(tensor.any() for tensor in tensors)


def test_many_tensors_are_matched_by_name_in_no_time() -> None:
    """Each of 30,000 was compared with all others: half a minute, and 100,000 took hours."""
    names = [f"net.experts.{number}.weight" for number in range(30_000)]
    entry = TensorEntry(dtype="F32", shape=(1,), chunks=())
    reader: Any = SimpleNamespace(entries=dict.fromkeys(names, entry))
    tensors = dict.fromkeys(names, torch.zeros(1))
    began = time.process_time()
    tree = {"net": [{"$tensor": name} for name in names]}
    assert api._destinations(reader, tree, tensors, Path()) == tensors
    report, _ = loading._match(reader, dict(zip(names, names, strict=True)), tensors, Path(), ())
    assert len(report.matched) == len(names)
    assert time.process_time() - began < 5


def take_over(run: Run) -> None:
    (run.path / "lock" / "owner-00002.json").write_bytes(
        (run.path / "lock" / "owner-00001.json").read_bytes()
    )


@pytest.mark.parametrize("when", ["checkpoint.after_directory", "checkpoint.before_rename"])
def test_a_run_that_was_taken_over_commits_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path)
    with run.lock() as lock:
        checkpoint.save(run, {"x": 1}, step=1, lock=lock)
        monkeypatch.setattr(disk, "failpoint", lambda name: take_over(run) if name == when else None)
        with pytest.raises(RunLocked, match="taken over"):
            checkpoint.save(run, {"x": 2}, step=2, lock=lock)
        (run.path / "lock" / "owner-00002.json").unlink()
    assert sorted(p.name for p in run.checkpoints_dir.iterdir()) == ["latest", "step-000000000001"]


def test_a_run_that_was_taken_over_leaves_what_the_other_is_saving_alone(tmp_path: Path) -> None:
    """Its node may be cut off from SLURM and not from the disk."""
    run = Run.create(tmp_path)
    with run.lock() as lock:
        take_over(run)
        others = [run.checkpoints_dir / f".tmp-{run.id}-5-0123456789abcdef"]
        others += [run.checkpoints_dir / ".latest.0123456789abcdef.tmp"]
        for path in others:
            path.mkdir()
        with pytest.raises(RunLocked, match="taken over"):
            checkpoint.save(run, {"x": 2}, step=2, lock=lock)
        (run.path / "lock" / "owner-00002.json").unlink()
    assert sorted(run.checkpoints_dir.iterdir()) == sorted(others)


def test_leftovers_of_this_run_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    token = "0123456789abcdef"
    own = [run.checkpoints_dir / f".{kind}-{run.id}-5-{token}" for kind in ("tmp", "del")]
    foreign = [
        run.checkpoints_dir / name
        for name in (f".tmp-other-5-{token}", f".tmp-{run.id}-x-5-{token}", ".tmp-x")
    ]
    for path in own + foreign:
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"half")
    checkpoint.save(run, {"x": 1}, step=6)
    assert not any(path.exists() for path in own)
    assert all((path / "rank-00000.safetensors").exists() for path in foreign)


def test_no_checkpoint_at_all_is_not_an_error(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "nothing") is None


def test_a_path_without_a_checkpoint_is_a_mistake_and_no_damage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no checkpoint at .*/step-7; "):
        checkpoint.load(tmp_path / "step-7", {})


def test_importing_the_room_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from headway.checkpoint import verify; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- several ranks


@ranks(2)
def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"disagree about 'a\.lr'"):
        checkpoint.save(tmp_path, {"a": {"lr": headway.rank()}}, step=1)
    with pytest.raises(UsageError, match=r"disagree about 'x'"):
        checkpoint.save(tmp_path, {"x": torch.ones(headway.rank() + 1)}, step=1)
    with pytest.raises(UsageError, match=r"disagree about 'step'"):
        checkpoint.save(tmp_path, {"x": 1}, step=headway.rank())
    with pytest.raises(UsageError, match=r"'a' is a builtins\.object"):
        checkpoint.save(tmp_path, {"a": object() if headway.rank() else 1}, step=1)
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_replicated_tensors_are_written_once_and_ranks_keep_their_own(tmp_path: Path) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 1}
    path = checkpoint.save(tmp_path, state, step=1, local={"rank": headway.rank()})
    sizes = [(path / f"rank-0000{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert all(4000 < size < 4400 for size in sizes), sizes
    loaded = checkpoint.load_latest(tmp_path, {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    assert loaded is not None and loaded.local == {"rank": headway.rank()}
    assert_equal(state, loaded.state)


@ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["before_file", "mid_file", "before_fsync", "rank_written"])
def test_an_error_on_one_rank_aborts_the_save_on_all(tmp_path: Path, point: str, rank: int) -> None:
    state = {"a": torch.ones(8), "b": torch.ones(8)}
    with (
        faults.at(f"checkpoint.{point}", rank=rank, action="errno=ENOSPC"),
        pytest.raises(StorageError, match="space"),
    ):
        checkpoint.save(tmp_path, state, step=1)
    headway.barrier()
    assert list(tmp_path.iterdir()) == []
    path = checkpoint.save(tmp_path, state, step=1)
    assert checkpoint.verify(path) == []


@ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_is_set_aside_and_the_next_is_taken_by_all(tmp_path: Path, rank: int) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"a": torch.full((9,), float(step)), "b": torch.ones(9)}, step=step)
    if headway.rank() == rank:  # whoever sees it
        for step in (2, 3):
            file = tmp_path / f"step-{step:012d}" / f"rank-0000{rank}.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    headway.barrier()
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None and loaded.step == 1 and loaded.state["a"][0] == 1
    headway.barrier()
    names = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert names == ["step-000000000001", "step-000000000002.corrupt-1", "step-000000000003.corrupt-1"]


@ranks(2)
def test_all_damaged_is_refused_on_all_ranks_and_again_later(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(9)}, step=1)
    if headway.is_root():
        (tmp_path / "step-000000000001" / "state.json").unlink()
    headway.barrier()
    for _ in range(2):
        with pytest.raises(NoValidCheckpoint, match="none is valid") as caught:
            checkpoint.load_latest(tmp_path)
        assert caught.value.exit_code == 86


# --- FSDP2: three ranks write, one, two and three read


def sharded(mesh: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small net after two steps of AdamW; 7 and 5 rows do not divide evenly, and the bias has too few."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    if mesh is not None:
        fully_shard(net, mesh=mesh)
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(2, 5)).sum().backward()
        adamw.step()
        adamw.zero_grad()
    return net, adamw


def full(value: Any) -> Any:
    return {
        name: t.full_tensor() if isinstance(t, torch.distributed.tensor.DTensor) else t
        for name, t in value.items()
    }


def flat_optimizer(net: torch.nn.Module, adamw: torch.optim.Optimizer) -> dict[str, Any]:
    state = get_optimizer_state_dict(net, adamw)["state"]
    return {f"{name}.{key}": value for name, values in state.items() for key, value in values.items()}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@ranks(3)
def test_fsdp_saves_on_three(shelf: Path) -> None:
    net, adamw = sharded(init_device_mesh("cpu", (3,)))
    path = checkpoint.save(shelf, {"net": net.state_dict(), "adamw": flat_optimizer(net, adamw)}, step=1)
    whole = {"net": full(net.state_dict()), "adamw": full(flat_optimizer(net, adamw))}
    if dist.is_root():
        torch.save(whole, shelf / "expected.pt")
        index = json.loads((path / "index.json").read_bytes())["holds"]
        assert [chunk["shape"][0] for chunk in index["net.0.weight"]["chunks"]] == [3, 3, 1]
        assert len(list(path.glob("*.safetensors"))) == 3


def read_sharded(shelf: Path, mesh: Any) -> None:
    torch.manual_seed(1)
    expected = torch.load(shelf / "expected.pt", weights_only=True)
    net, adamw = sharded(mesh)
    state = {"net": net.state_dict(), "adamw": flat_optimizer(net, adamw)}
    for part in state.values():
        for tensor in part.values():
            (tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor).fill_(-1)
    loaded = checkpoint.load(shelf / "step-000000000001", state)
    assert loaded.world_size == 3
    for part in expected:
        assert_equal(expected[part], full(dict(loaded.state[part])))
    assert_equal(dict(expected["net"]), full(dict(net.state_dict())))


@ranks(2)
def test_fsdp_loads_on_two(shelf: Path) -> None:
    read_sharded(shelf, init_device_mesh("cpu", (2,)))


@ranks(3)
def test_fsdp_loads_on_three(shelf: Path) -> None:
    read_sharded(shelf, init_device_mesh("cpu", (3,)))


def test_fsdp_loads_on_one(shelf: Path) -> None:
    read_sharded(shelf, None)
    expected = torch.load(shelf / "expected.pt", weights_only=True)
    assert_equal(expected["net"], checkpoint.load(shelf / "step-000000000001").state["net"])
    assert FAILPOINT not in os.environ


def test_files_of_two_ranks_swapped_are_found(shelf: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shelf / "step-000000000001", tmp_path / "step-000000000001")
    assert checkpoint.verify(copy) == []
    one, two = copy / "rank-00000.safetensors", copy / "rank-00001.safetensors"
    one.rename(copy / "aside")
    two.rename(one)
    (copy / "aside").rename(two)
    assert {problem.partition(":")[0] for problem in checkpoint.verify(copy)} == {one.name, two.name}


@ranks(3)
def test_two_dimensional_shards_are_read_by_ranges(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(6 * 7.0).reshape(6, 7)
    for step, saved in enumerate((Shard(0), Shard(1))):
        path = checkpoint.save(tmp_path, {"w": distribute_tensor(whole, mesh, [saved])}, step=step)
        for wanted in (Shard(0), Shard(1)):
            target = distribute_tensor(torch.zeros(6, 7), mesh, [wanted])
            checkpoint.load(path, {"w": target})
            assert_equal(whole, target.full_tensor())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_the_gpu_return_to_the_gpu(tmp_path: Path) -> None:
    state = {
        "a": torch.rand(1000, 33, device="cuda"),
        "b": torch.rand(7, device="cuda").bfloat16(),
        "c": torch.tensor(3),
    }
    path = checkpoint.save(tmp_path, state, step=1)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(path, target)
    assert_equal({name: t.cpu() for name, t in state.items()}, {name: t.cpu() for name, t in target.items()})
    assert target["a"].is_cuda and checkpoint.load(path).state["a"].device.type == "cpu"


def test_small_and_large_parts_keep_their_order(tmp_path: Path) -> None:
    from headway.checkpoint.write.disk import write_file

    lengths = [0, 5, 1 << 20, 7, (8 << 20) + 3, (1 << 20) - 1, *[900_000] * 12, 1]
    parts = [os.urandom(length) for length in lengths]
    fact = write_file(tmp_path / "file", map(memoryview, parts))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert fact.bytes == sum(lengths) and fact.crc32 == f"{zlib.crc32(b''.join(parts)):08x}"


def test_who_may_read_only_the_checkpoints_of_a_run_loads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path)
    checkpoint.save(run, {"x": 1}, step=1)

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(api, "check_free", refuse)  # root, who runs tests in containers, may read everything
    for where in (run.path, run.checkpoints_dir):
        loaded = checkpoint.load_latest(where)
        assert loaded is not None and loaded.step == 1
