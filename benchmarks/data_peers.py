"""The loaders that benchmarks/data.py compares: each reads the same photos, shuffled, in batches of 64, as RGB arrays.

All but DALI decode with simplejpeg. A loader with a format of its own gets the photos in that format. Each loader runs
in a process of its own, which alone imports it.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
import simplejpeg

BATCH = 64


class Contender(ABC):
    """A loader to compare. Its constructor does no work. With `state`, it resumes from a saved position."""

    title: str
    needs: str | None = None
    modules: tuple[str, ...] = ()
    resumes = False
    reads_shards = False

    def __init__(self, data: Path, threads: int, state: Path | None = None) -> None:
        self.data, self.threads, self.state = data, threads, state
        self.shards = sorted(str(path) for path in (data / "shards").glob("*.tar"))

    @classmethod
    def is_installed(cls) -> bool:
        if cls.needs is None:
            return True
        return find_spec(cls.needs.partition(".")[0]) is not None and find_spec(cls.needs) is not None

    @classmethod
    def prepare(cls, data: Path) -> None:
        """Writes the photos in the loader's own format, if it has one."""
        assert (data / "shards").is_dir()

    @classmethod
    def tidy(cls) -> None:
        """Removes what the loader leaves behind; usually nothing."""
        assert cls.title

    def imports(self) -> None:
        """Imports what the loader needs, before the timer starts."""
        for module in self.modules:
            import_module(module)

    @abstractmethod
    def batches(self) -> Iterator[int]:
        """Yields the number of samples of each batch; a 0 restarts the timer."""

    def save(self, path: Path) -> None:
        """Writes the position, if the loader supports it."""
        raise NotImplementedError


class Bare(Contender):
    """The decoder alone, with headway's settings: no reading, no new memory, one call per image and thread."""

    title = "bare decoder threads"
    reads_shards = True
    modules = ("headway.data.shards.shard",)

    def batches(self) -> Iterator[int]:
        raw = list(photos(self.data))
        largest = max(3 * height * width for height, width, *_ in map(simplejpeg.decode_jpeg_header, raw))
        outs = [np.ones((4 * BATCH, largest), np.uint8) for _ in range(self.threads)]
        done: SimpleQueue[int] = SimpleQueue()
        yield 0  # neither reading nor touching memory for the first time is counted
        for number, out in enumerate(outs):
            threading.Thread(target=self._decode, args=(raw[number :: self.threads], out, done)).start()
        while raw:
            count = done.get()
            yield count
            del raw[:count]

    @staticmethod
    def _decode(raw: list[bytes], out: Any, done: SimpleQueue[int]) -> None:
        for at in range(0, len(raw), BATCH // 2):
            some = raw[at : at + BATCH // 2]
            for number, photo in enumerate(some, at):
                simplejpeg.decode_jpeg(photo, buffer=out[number % len(out)])
            done.put(len(some))


class Headway(Contender):
    title = "headway"
    modules = ("headway.data.shard_loader", "headway.dist.shared_run")
    resumes = True

    def batches(self) -> Iterator[int]:
        from headway.data import ShardLoader

        self.loader = ShardLoader(self.shards, batch_size=BATCH, threads=self.threads)
        if self.state is not None:
            self.loader.load_state_dict(json.loads(self.state.read_text()))
        for batch in self.loader:
            yield len(batch["jpg"])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.loader.state_dict()))


class Dali(Contender):
    title = "DALI, CPU"
    needs = "nvidia.dali"
    modules = ("nvidia.dali.fn", "nvidia.dali.types")
    resumes = True

    def batches(self) -> Iterator[int]:
        from nvidia.dali import fn, pipeline_def, types

        @pipeline_def(batch_size=BATCH, num_threads=self.threads, device_id=None)
        def reader() -> Any:
            raw, _ = fn.readers.webdataset(
                paths=self.shards,
                index_paths=[shard.removesuffix("tar") + "idx" for shard in self.shards],
                ext=["jpg", "cls"],
                random_shuffle=True,
                name="reader",
            )
            return fn.decoders.image(raw, device="cpu", output_type=types.RGB)

        checkpoint = None if self.state is None else self.state.read_bytes()
        self.pipe = reader(enable_checkpointing=self.resumes, checkpoint=checkpoint)
        self.pipe.build()
        for _ in range(self.pipe.reader_meta("reader")["epoch_size"] // BATCH):
            yield len(self.pipe.run()[0])

    def save(self, path: Path) -> None:
        path.write_bytes(self.pipe.checkpoint())


class Spdl(Contender):
    title = "SPDL"
    reads_shards = True
    needs = "spdl.pipeline"
    modules = ("spdl.pipeline", "spdl.io")

    def batches(self) -> Iterator[int]:
        from spdl.io import iter_tarfile
        from spdl.pipeline import PipelineBuilder

        def members() -> Iterator[Any]:
            for shard in self.shards:
                with Path(shard).open("rb") as file:
                    yield from (data for name, data in iter_tarfile(file) if name.endswith(".jpg"))

        pipeline = (
            PipelineBuilder()
            .add_source(members())
            .pipe(simplejpeg.decode_jpeg, concurrency=self.threads, output_order="input")
            .aggregate(BATCH)
            .add_sink(3)
            .build(num_threads=self.threads)
        )
        with pipeline.auto_stop():
            for batch in pipeline.get_iterator():
                yield len(batch)


class WebDataset(Contender):
    title = "WebDataset"
    reads_shards = True
    needs = "webdataset"
    modules = ("webdataset",)

    def batches(self) -> Iterator[int]:
        import webdataset as wds

        dataset = (
            wds.WebDataset(self.shards, shardshuffle=100)
            .map(lambda sample: simplejpeg.decode_jpeg(sample["jpg"]))
            .batched(BATCH, collation_fn=list)
        )
        for batch in wds.WebLoader(dataset, batch_size=None, num_workers=self.threads):
            yield len(batch)


class TorchFiles(Contender):
    title = "torch DataLoader, files"
    modules = ("torch.utils.data",)

    @classmethod
    def prepare(cls, data: Path) -> None:
        (data / "files").mkdir()
        for number, photo in enumerate(photos(data)):
            (data / "files" / f"{number:06d}.jpg").write_bytes(photo)

    def batches(self) -> Iterator[int]:
        from torch.utils.data import DataLoader

        files = Files(sorted((self.data / "files").iterdir()))
        for batch in DataLoader(files, BATCH, shuffle=True, num_workers=self.threads, collate_fn=list):
            yield len(batch)


class Files:
    """One file per sample: the most common input of torch's loader."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return simplejpeg.decode_jpeg(self.paths[index].read_bytes())


class Streaming(Contender):
    title = "MosaicML Streaming"
    needs = "streaming"
    resumes = True

    def imports(self) -> None:
        self.module()

    @staticmethod
    def module() -> Any:
        # it imports torchvision, whose wheel is for another build of torch: its operators are neither there nor needed
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
        import streaming

        return streaming

    @classmethod
    def prepare(cls, data: Path) -> None:
        with cls.module().MDSWriter(out=str(data / "mds"), columns={"jpg": "bytes"}) as out:
            for photo in photos(data):
                out.write({"jpg": photo})

    @classmethod
    def tidy(cls) -> None:
        """Removes shared memory that stopped processes left behind."""
        for path in Path("/dev/shm").glob("0000[0-9][0-9]_*"):  # its own cleaning stops at the first gap
            path.unlink(missing_ok=True)

    def batches(self) -> Iterator[int]:
        streaming = self.module()

        class Photos(streaming.StreamingDataset):  # type: ignore[misc,name-defined]
            def __getitem__(self, at: int) -> Any:
                return simplejpeg.decode_jpeg(super().__getitem__(at)["jpg"])

        self.tidy()
        dataset = Photos(local=str(self.data / "mds"), shuffle=True, batch_size=BATCH)
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=self.threads, collate_fn=_named
        )
        if self.state is not None:
            self.loader.load_state_dict(json.loads(self.state.read_text()))
        for batch in self.loader:
            yield len(batch["jpg"])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.loader.state_dict()))


def _named(samples: list[Any]) -> dict[str, Any]:
    return {"jpg": samples}  # of a list, Streaming would count the rows of the first photo


class Litdata(Contender):
    title = "litdata"
    needs = "litdata"
    modules = ("litdata",)
    resumes = True

    @classmethod
    def prepare(cls, data: Path) -> None:
        import litdata

        raw = list(photos(data))
        litdata.optimize(
            raw.__getitem__,
            list(range(len(raw))),
            str(data / "litdata"),
            chunk_bytes="64MB",
            num_workers=1,
            verbose=False,
        )

    def batches(self) -> Iterator[int]:
        import litdata

        class Photos(litdata.StreamingDataset):  # type: ignore[misc,name-defined]
            def __getitem__(self, at: Any) -> Any:
                return simplejpeg.decode_jpeg(super().__getitem__(at))

        dataset = Photos(str(self.data / "litdata"), shuffle=True)
        self.loader = litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=self.threads, collate_fn=list
        )
        if self.state is not None:
            self.loader.load_state_dict(pickle.loads(self.state.read_bytes()))
        for batch in self.loader:
            yield len(batch)

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self.loader.state_dict()))


CONTENDERS: dict[str, type[Contender]] = {
    kind.__name__.lower(): kind
    for kind in (Bare, Headway, Dali, Spdl, WebDataset, TorchFiles, Litdata, Streaming)
}


def photos(data: Path) -> Iterator[bytes]:
    """Returns the encoded photos in the shards."""
    from headway.data import Shard

    for path in sorted((data / "shards").glob("*.tar")):
        shard = Shard.open(path)
        for number in range(len(shard)):
            yield bytes(shard[number]["jpg"])
