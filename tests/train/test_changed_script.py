"""A script that changed since its run was saved is refused in one sentence, with exit code 2: no attempt is counted."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_checkpoint_settings import cut
from test_resume import BATCH, Cut, Traced, make
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from toys import make_net

import headway as hw
from headway import checkpoint
from headway.checkpoint.retention import Retention, prune
from headway.data.fingerprint import fingerprints
from headway.errors import NewerFormat, NoValidCheckpoint, UsageError
from headway.run import Run
from headway.train import Pipeline, Stage
from headway.train.resume.state import compare_datasets

alone = pytest.mark.usefixtures("alone")


def refused(pipe: Pipeline, said: str) -> None:
    with pytest.raises(UsageError, match=said + r".*resume=\"never\"") as caught:
        pipe.run()
    assert caught.value.exit_code == 2
    assert pipe.directory.info()["attempts"][-1]["exit_code"] == 2, "which is not an attempt without progress"


@alone
def test_a_layer_that_was_removed(tmp_path: Path) -> None:
    class Fewer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = make_net().first

    cut(tmp_path, 8)
    refused(
        make(tmp_path, Traced(), model=Fewer),
        r"has 'norm.weight' and 6 more, which model 'net' no longer has",
    )


@alone
def test_an_object_that_does_not_take_its_state(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {self.name: 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state[self.name]

    def pipe(name: str, **options: Any) -> Pipeline:
        made = make(tmp_path, Traced(**options))
        made.register_state("counter", Counter(name))
        return made

    with pytest.raises(Cut):
        pipe("old", cut=8).run()
    refused(pipe("new"), r"state 'counter' does not accept the state in the checkpoint \(KeyError: 'new'\)")


@alone
def test_a_run_may_go_on_in_fp16(tmp_path: Path) -> None:
    """A checkpoint of another precision has no loss scale: it begins with the first one."""
    cut(tmp_path, 8)
    pipe = make(tmp_path, Traced(precision="fp16"))
    pipe.run()
    assert pipe.steps_done == 33


@alone
def test_a_loop_of_ones_own_that_became_a_managed_one(tmp_path: Path) -> None:
    class Own(Stage):
        def run_epoch(self) -> None:
            for _ in self.batches("train"):
                if self.steps_done == 7:
                    raise Cut

    with pytest.raises(Cut):
        make(tmp_path, Own()).run()
    refused(
        make(tmp_path, Traced()),
        r"stage 'train' does not accept the state in the checkpoint \(KeyError: 'precision'\)",
    )


# --- another dataset


def tensors(shift: float = 0.0) -> TensorDataset:
    x = torch.randn(88, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x + shift, x[:, :3].argmax(1))


def loader(dataset: Any) -> hw.data.DataLoader[Any]:
    return hw.data.DataLoader(dataset, global_batch_size=BATCH, shuffle=True, seed=3)


@alone
def test_another_dataset_of_the_same_length(tmp_path: Path) -> None:
    first = cut(tmp_path, 8, loader=loader(tensors()))
    refused(
        make(tmp_path, Traced(), loader=loader(tensors(1.0))),
        "dataset 'train' is not the one that .* other content",
    )
    shorter = TensorDataset(*(each[:80] for each in tensors().tensors))
    refused(
        make(tmp_path, Traced(), loader=loader(shorter)),
        "dataset 'train' is not the one that .* it has other content",
    )
    pipe = make(tmp_path, Traced(), loader=loader(tensors()))
    pipe.run()
    assert pipe.directory == first.directory


def test_what_a_fingerprint_sees() -> None:
    whole = tensors()

    class Files:
        def __init__(self, *names: str) -> None:
            self.samples = [(name, 0) for name in names]

        def __len__(self) -> int:
            return len(self.samples)

    class Secret:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, _: int) -> int:
            raise AssertionError("loaded in the training process")

    alike = [
        (whole, tensors()),
        (Subset(whole, [1, 2]), Subset(tensors(), [1, 2])),
        (ConcatDataset([whole, whole]), ConcatDataset([tensors(), whole])),
        (Files("/a/1.png", "/a/2.png"), Files("/b/1.png", "/b/2.png")),
        ([1.0, 2.0], [1.0, 2.0]),
        (np.arange(4), np.arange(4)),
        (torch.arange(4), torch.arange(4)),
        (range(4), range(4)),
    ]
    for one, other in alike:
        assert fingerprints(loader(one)) == fingerprints(loader(other)) != {}
    different = [
        tensors(1.0),
        Subset(whole, [1, 3]),
        ConcatDataset([whole, tensors(1.0)]),
        Files("1.png", "3.png"),
        [1.0, 3.0],
    ]
    digests = [fingerprints(loader(each))[""] for each in (*(one for one, _ in alike), *different)]
    assert len(set(digests)) == len(digests)
    assert fingerprints(loader(Secret())) == fingerprints([1]) == {}


def test_what_cannot_be_read_has_no_fingerprint() -> None:
    class Slots:
        __slots__ = ()

        def __len__(self) -> int:
            return 3

    class Kept:
        def __init__(self, data: Any) -> None:
            self.data = data

        def __len__(self) -> int:
            return 3

    for each in (
        Slots(),
        {0: 1, 1: 2},
        Kept(torch.tensor(3.0)),
        Kept(np.array(3.0)),
        Kept(torch.eye(3).to_sparse()),
        Subset(Slots(), {1, 2}),  # type: ignore[arg-type]
    ):
        assert fingerprints(loader(each)) == {}, each


def test_a_dataset_of_hugging_face_whose_function_cannot_be_hashed() -> None:
    class Mapped:
        column_names: ClassVar = ["text"]

        def __init__(self, hashed: str, rows: int = 3, name: str = "t-train.arrow") -> None:
            self._fingerprint, self.num_rows = hashed, rows
            self.cache_files = [{"filename": f"/a/{file}"} for file in (name, f"cache-{hashed}.arrow")]

        def __len__(self) -> int:
            return self.num_rows

    digest = fingerprints(loader(Mapped("1")))
    assert digest == fingerprints(loader(Mapped("2"))) != {}, "it is random in every process"
    assert fingerprints(loader(Mapped("1", rows=4))) != digest
    assert fingerprints(loader(Mapped("1", name="t-test.arrow"))) != digest


def test_a_shard_that_was_refilled(tmp_path: Path) -> None:
    folder = tmp_path / "shards"

    def found() -> dict[str, str]:
        return fingerprints(hw.data.ShardLoader(str(folder), batch_size=2))

    def pack(word: str) -> dict[str, str]:
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, [{"__key__": f"{number}", "txt": word} for number in range(4)])
        return found()

    assert pack("one") == pack("one") != {}
    assert pack("one") != pack("two")
    before = found()
    assert hw.data.index(str(folder)), "which headway itself advises"
    assert found() == before
    shards = hw.data.ShardLoader(str(folder), batch_size=2)
    (folder / "000.tar").rename(folder / "away")
    assert fingerprints(shards) == {}, "what cannot be read now is not compared"


def test_only_sources_that_both_have_are_compared(tmp_path: Path) -> None:
    def pipe(**words: str) -> Pipeline:
        for name, word in words.items():
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            write(tmp_path / name, [{"__key__": f"{number}", "txt": word} for number in range(4)])
        mix = hw.data.Mix(dict.fromkeys(words, 0.5), shards={name: str(tmp_path / name) for name in words})
        made = Pipeline(name="mix", root=tmp_path / "runs")
        made.register_dataset("train", hw.data.ShardLoader(mix, batch_size=2))
        made._state.directory = Run.create(tmp_path / "runs")
        return made

    saved: dict[str, Any] = {"run": {"fingerprints": compare_datasets(pipe(a="one", b="one"), None)}}
    compare_datasets(pipe(a="one", c="two"), saved)
    with pytest.raises(
        UsageError, match=r"dataset 'train' is not the one .* other content, in 'a'; restore it"
    ):
        compare_datasets(pipe(a="two", c="two"), saved)
    compare_datasets(pipe(a="two", c="two"), {"run": {"fingerprints": {"train": "0123456789abcdef"}}})


def write(folder: Path, samples: list[dict[str, str]]) -> None:
    folder.mkdir()
    with tarfile.open(folder / "000.tar", "w") as shard:
        for sample in samples:
            data = sample["txt"].encode()
            info = tarfile.TarInfo(f"{sample['__key__']}.txt")
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))


# --- a newer headway


def renumber(run: Run, step: int, form: int, *, seal: bool) -> Path:
    """Makes the manifest of a checkpoint one of a later format."""
    path = run.checkpoint_dir(step) / "manifest.json"
    facts = json.loads(path.read_text())
    if not seal:
        path.write_text(json.dumps(facts | {"format": form}))
        return path
    text = path.read_bytes().replace(b'"format": 1', f'"format": {form}'.encode())
    body = text[: text.rindex(b',\n "crc32"')]
    path.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())
    return path


@pytest.mark.parametrize("seal", [True, False])
def test_a_newer_format_is_left_as_it_is(seal: bool, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    for step in (1, 2):
        checkpoint.save(run, {"x": step}, step=step)
    path = renumber(run, 2, 2, seal=seal)
    before = path.read_bytes()
    for use in (checkpoint.find_valid, checkpoint.load_latest, lambda _: checkpoint.load(path.parent)):
        with pytest.raises(
            NewerFormat, match=r"has format 2, written by a newer headway; .*: upgrade headway"
        ) as caught:
            use(run)
        assert caught.value.exit_code == NoValidCheckpoint.exit_code == 86
    assert path.read_bytes() == before
    assert prune(run, Retention(keep_last=2)) == []
    path.write_bytes(
        before.replace(b'"format": 2', b'"format": 3', 1)[:-9]
    )  # cut off: damaged, whatever it says
    assert checkpoint.find_valid(run) == run.checkpoint_dir(1)
